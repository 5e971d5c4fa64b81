"""torch's ``scaled_dot_product_attention``; a step writes its new tokens into the cache in place first."""

from __future__ import annotations

from functools import partial

import numpy as np

from tools.bench.parts.attention_expected import attend_flat
from tools.bench.parts.attention_problem import AttentionProblem
from tools.bench.parts.engine import AnyEngine, Prepared, optional
from tools.bench.parts.problem import Array
from tools.bench.parts.unavailable import UnavailableError

# By the norm of y. bfloat16 rounds y and probabilities to 8 bits; averages of many values lose a few times that.
_TOLERANCES = {"float32": 2e-5, "bfloat16": 1e-2}


def engines() -> list[AnyEngine[AttentionProblem]]:
    """Return both types, each as torch groups heads and, ``-grouped``, with the heads of a group as so many queries."""
    return [
        AnyEngine(
            f"torch-{type_name}{'-grouped' if grouped else ''}",
            _TOLERANCES[type_name],
            partial(_prepare, type_name=type_name, grouped=grouped),
            kind="attention",
        )
        for type_name in _TOLERANCES
        for grouped in (False, True)
    ]


def _prepare(problem: AttentionProblem, type_name: str, grouped: bool) -> Prepared:
    torch = optional("torch")
    torch.set_num_threads(problem.settings.memory.threads)
    case, dtype = problem.case, getattr(torch, type_name)
    if grouped and case.tokens > 1:
        raise UnavailableError("several new tokens cannot be so many heads: a query would see what is behind it")
    first = problem.keep(("torch", type_name), lambda: [torch.from_numpy(each).to(dtype) for each in problem.cache])
    size = sum(each.numel() * dtype.itemsize for each in first)
    caches = [first, *([each.clone() for each in first] for _ in range(problem.copies(size) - 1))]
    query = torch.from_numpy(problem.query).to(dtype)
    shape = (1, case.kv_heads, -1, case.size) if grouped else (1, case.tokens, case.heads, case.size)
    asked = query.reshape(shape) if grouped else query.reshape(shape).transpose(1, 2).contiguous()
    fresh = [torch.from_numpy(each.copy()).to(dtype) for each in problem.new]
    seen = torch.arange(case.context) <= torch.arange(case.past, case.context)[:, None]
    options = {"attn_mask": seen} if case.tokens > 1 else {}
    made: list[object] = [None for _ in caches]

    def run() -> None:
        with torch.inference_mode():
            for copy, cache in enumerate(caches):
                for stored, new in zip(cache, fresh, strict=True):
                    stored[:, :, case.past :] = new
                made[copy] = torch.nn.functional.scaled_dot_product_attention(
                    asked, *cache, scale=problem.scale, enable_gqa=not grouped, **options
                )

    def outputs() -> list[Array]:
        turned = (torch.as_tensor(y).float() for y in made)
        return [(y if grouped else y.transpose(1, 2)).numpy() for y in turned]

    def read(head: int, part: slice) -> tuple[Array, Array]:
        keys, values = (np.asarray(each[0, head, part].float().numpy()) for each in first)
        return keys, values

    def expect() -> Array:
        return attend_flat(query.double().numpy(), problem.scale, case.context, read, case.kv_heads)

    expected = problem.keep(("torch expects", type_name), expect)
    return Prepared(run, outputs, expected, size + problem.bytes_of_activations * dtype.itemsize // 4)
