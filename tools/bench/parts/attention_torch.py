"""torch's ``scaled_dot_product_attention``; a step writes its new tokens into the cache in place first."""

from __future__ import annotations

from functools import partial

import numpy as np

from tools.bench.parts.attention_problem import AttentionProblem
from tools.bench.parts.attention_reference import attend_flat
from tools.bench.parts.engine import AnyEngine, Workload, optional
from tools.bench.parts.problem import Array
from tools.bench.parts.unavailable import UnavailableError

# By the norm of y. bfloat16 rounds y and probabilities to 8 bits; averages of many values lose a few times that.
_TOLERANCES = {"float32": 2e-5, "bfloat16": 1e-2}


def engines() -> list[AnyEngine[AttentionProblem]]:
    """Return both types, each with groups left to torch and, ``-grouped``, with heads of a group as queries of one."""
    return [
        AnyEngine(
            f"torch-{type_name}{'-grouped' if group_heads else ''}",
            _TOLERANCES[type_name],
            partial(_prepare, type_name=type_name, group_heads=group_heads),
            kind="attention",
        )
        for type_name in _TOLERANCES
        for group_heads in (False, True)
    ]


def _prepare(problem: AttentionProblem, type_name: str, group_heads: bool) -> Workload:
    torch = optional("torch")
    torch.set_num_threads(problem.settings.memory.threads)
    case, dtype = problem.case, getattr(torch, type_name)
    if group_heads and case.tokens > 1:
        raise UnavailableError(
            "several new tokens cannot be grouped: queries that are heads of a group would see tokens after them"
        )
    first = problem.keep(("torch", type_name), lambda: [torch.from_numpy(tensor).to(dtype) for tensor in problem.cache])
    size = sum(tensor.numel() * dtype.itemsize for tensor in first)
    caches = [first, *([tensor.clone() for tensor in first] for _ in range(problem.copies(size) - 1))]
    query = torch.from_numpy(problem.query).to(dtype)
    shape = (1, case.kv_heads, -1, case.size) if group_heads else (1, case.tokens, case.heads, case.size)
    queries = query.reshape(shape) if group_heads else query.reshape(shape).transpose(1, 2).contiguous()
    new_tensors = [torch.from_numpy(array.copy()).to(dtype) for array in problem.new]
    mask = torch.arange(case.context) <= torch.arange(case.past, case.context)[:, None]
    options = {"attn_mask": mask} if case.tokens > 1 else {}
    results: list[object] = [None for _ in caches]

    def run() -> None:
        with torch.inference_mode():
            for copy, cache in enumerate(caches):
                for tensor, new in zip(cache, new_tensors, strict=True):
                    tensor[:, :, case.past :] = new
                results[copy] = torch.nn.functional.scaled_dot_product_attention(
                    queries, *cache, scale=problem.scale, enable_gqa=not group_heads, **options
                )

    def outputs() -> list[Array]:
        floats = (torch.as_tensor(y).float() for y in results)
        return [(y if group_heads else y.transpose(1, 2)).numpy() for y in floats]

    def read_tokens(head: int, part: slice) -> tuple[Array, Array]:
        keys, values = (np.asarray(tensor[0, head, part].float().numpy()) for tensor in first)
        return keys, values

    def expect() -> Array:
        return attend_flat(query.double().numpy(), problem.scale, case.context, read_tokens, case.kv_heads)

    reference = problem.keep(("torch expects", type_name), expect)
    return Workload(run, outputs, reference, size + problem.bytes_of_activations * dtype.itemsize // 4)
