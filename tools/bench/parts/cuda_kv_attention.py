"""KVAttention on a GPU: one or a few new tokens over a long context, beside torch's attention over float16."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from graphopt.runtime_ops.kv_attention.spec.attributes import STORAGES, KVAttributes
from tests.runtime_ops.cuda import interface
from tests.runtime_ops.cuda.kv_attention import Call
from tools.bench.parts.cuda_case import Case, Wanted, copies_past_l2, every, stream_of

SIZES = ((1, 8192, 1), (1, 32768, 1), (1, 131072, 1), (8, 131072, 1), (1, 8192, 4), (1, 131072, 4), (1, 8192, 64))
"""Rows, tokens that each has with the new ones, and how many of them are new."""


def cases(
    library: ctypes.CDLL,
    torch: Any,
    device: str = "cuda",
    *,
    sizes: Sequence[tuple[int, int, int]] = SIZES,
    storages: Sequence[str] = ("float16", "int8", "int4"),
    heads: tuple[int, int] = (32, 8),
    size: int = 128,
    wanted: Wanted = every,
) -> Iterator[Case]:
    """Yield a case for each size and storage: dense, float16 queries; tokens are a multiple of the page, 64.

    New tokens are at most a page.
    """
    for rows, tokens, fresh in sizes:
        for storage in storages:
            if wanted(_title(storage, rows, tokens, fresh)):
                yield _case(library, torch, device, rows, tokens, fresh, storage, heads, size)


def _title(storage: str, rows: int, tokens: int, fresh: int) -> str:
    return f"KVAttention {storage} {rows} x {tokens}, {fresh} new"


def _case(
    library: ctypes.CDLL,
    torch: Any,
    device: str,
    rows: int,
    tokens: int,
    fresh: int,
    storage: str,
    heads: tuple[int, int],
    size: int,
) -> Case:
    attrs = KVAttributes(kv_heads=heads[1], scale=size**-0.5, page=64, storage=storage)
    shapes = {name: tensor for name, tensor in attrs.state(rows, tokens // attrs.page, size)}  # noqa: C416 - no dict
    moved = shapes["keys"].bytes + shapes["values"].bytes + shapes["scales"].bytes
    copies, group = copies_past_l2(torch, device, moved), heads[0] // heads[1]

    def drawn(name: str) -> Any:
        tensor = shapes[name]
        if tensor.dtype == np.uint8:
            return torch.randint(0, 256, tensor.shape, dtype=torch.uint8, device=device)
        dtype = torch.float16 if tensor.dtype == np.float16 else torch.float32
        return torch.randn(tensor.shape, dtype=dtype, device=device) / (16 if name == "scales" else 1)

    def activations(width: int) -> Any:
        return torch.randn(rows, fresh, width * size, dtype=torch.float16, device=device)

    states = [{name: drawn(name) for name in shapes} for _ in range(copies)]
    query, key, value = (activations(width) for width in (heads[0], heads[1], heads[1]))
    y = [torch.empty_like(query) for _ in range(copies)]
    past = tokens - fresh
    on_host = {"policies": np.zeros(heads[1], np.uint8), "past": np.full(rows, past), "fresh": np.full(rows, fresh)}
    calls = []
    for copy in range(copies):
        call = Call(type=10, storage=STORAGES.index(storage), rows=rows, columns=fresh, kv_heads=heads[1])
        call.size, call.page, call.pages, call.recent, call.scale = size, 64, tokens // 64, 1, attrs.scale
        call.group, call.clip = group, attrs.clip
        for name, array in on_host.items():
            setattr(call, name, array.ctypes.data)
        tensors = {"query": query, "key": key, "value": value, "y": y[copy], **states[copy]}
        for name, tensor in tensors.items():  # the operator has a number `recent` too
            setattr(call, {"recent": "slots"}.get(name, name), tensor.data_ptr())
        calls.append(call)
    scratch_bytes = library.graphopt_cuda_kv_attention_scratch(ctypes.byref(calls[0]))
    scratch = torch.empty(scratch_bytes + 16, dtype=torch.uint8, device=device)

    def run(copy: int, _kept: object = (on_host, key, value)) -> None:
        calls[copy].scratch = scratch.data_ptr() + -scratch.data_ptr() % 16
        interface.check(library.graphopt_cuda_kv_attention(ctypes.byref(calls[copy]), stream_of(torch, device)))

    def error(copy: int) -> float:
        keys, values = _tokens(torch, states[copy], storage, size)
        q = query.double().reshape(rows, fresh, heads[1], group, size).transpose(1, 2)
        scores = q.flatten(2, 3) @ keys.mT * attrs.scale  # [rows, KV heads, new token and head of the group, tokens]
        later = torch.ones(fresh, tokens, dtype=torch.bool, device=device).triu(past + 1)
        scores.masked_fill_(later.repeat_interleave(group, dim=0), float("-inf"))
        results = (torch.softmax(scores, dim=-1) @ values).reshape(rows, heads[1], fresh, group, size)
        expected = results.transpose(1, 2).reshape(rows, fresh, -1)
        return float((y[copy].double() - expected).norm() / expected.norm())

    def poison(copy: int) -> None:
        y[copy].fill_(float("nan"))

    rivals = {}
    if device == "cuda":
        other = [
            torch.randn(2, rows, heads[1], tokens, size, dtype=torch.float16, device=device) for _ in range(copies)
        ]
        q = query.reshape(rows, fresh, heads[0], size).transpose(1, 2)
        attention = torch.nn.functional.scaled_dot_product_attention
        # without a mask: the few tokens that new ones must not read are read anyway
        rivals["torch attention, float16"] = lambda copy: attention(q, other[copy][0], other[copy][1], enable_gqa=True)
    # half a unit in the last place of y, and what float32 sums of so many tokens may lose
    return Case(_title(storage, rows, tokens, fresh), moved, copies, poison, run, error, 2**-10, rivals)


def _tokens(torch: Any, state: dict[str, Any], storage: str, size: int) -> tuple[Any, Any]:
    """Return keys and values, float64 [rows, heads, tokens, size]; the last page of codes is in its slot."""
    keys, values = state["keys"], state["values"]
    rows, heads, pages = keys.shape[:3]
    if storage == "float16":
        keys = keys.double().reshape(rows, heads, pages, 4, size, 16).transpose(-1, -2)
        return keys.reshape(rows, heads, -1, size), values.double().reshape(rows, heads, -1, size)

    def unpacked(codes: Any, lanes: int, summed: int) -> Any:
        fours = codes.reshape(rows, heads, pages, lanes // 16, -1, 16, 4)
        if storage == "int4":
            fours = torch.stack([fours & 15, fours >> 4], dim=-3).flatten(-4, -3)
        return fours.transpose(-2, -3).reshape(rows, heads, pages, lanes, summed).double()

    low, step, value_low, value_step = state["scales"].double().split([size, size, 64, 64], dim=-1)
    keys = low[..., None, :] + step[..., None, :] * unpacked(keys, 64, size)
    values = value_low[..., None] + value_step[..., None] * unpacked(values, size, 64).mT
    newest = state["recent"].double().reshape(rows, heads, 2, 64, size)
    keys[:, :, -1], values[:, :, -1] = newest[:, :, 0], newest[:, :, 1]
    return keys.reshape(rows, heads, -1, size), values.reshape(rows, heads, -1, size)
