"""KVAttention on a GPU: new tokens over a long context, and prompts, beside torch's attention over float16."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import numpy as np

from graphopt.runtime_ops.kv_attention.spec.attributes import RETRIEVAL, STORAGES, KVAttributes, StateTensor
from tests.runtime_ops.cuda import interface
from tests.runtime_ops.cuda.kv_attention import Call
from tools.bench.parts.cuda_case import Case, CaseFilter, all_cases, copies_past_l2, stream_of

SIZES = (
    (1, 512, 1),
    (1, 8192, 1),
    (1, 32768, 1),
    (1, 131072, 1),
    (8, 131072, 1),
    (1, 8192, 4),
    (1, 131072, 4),
    (1, 8192, 64),
    (1, 2048, 2048),
    (1, 8192, 2048),
)
"""Rows, tokens that each has with the new ones, and how many of them are new."""

RETRIEVALS = ((1, 131072, 1, 4096), (1, 131072, 4, 4096))
"""The same, and the tokens in the pages that each query chooses; it also reads the first and the newest page."""

_PAGE = 64


def cases(
    library: ctypes.CDLL,
    torch: Any,
    device: str = "cuda",
    *,
    sizes: Sequence[tuple[int, int, int]] = SIZES,
    retrievals: Sequence[tuple[int, int, int, int]] = RETRIEVALS,
    storages: Sequence[str] = ("float16", "int8", "int4"),
    heads: tuple[int, int] = (32, 8),
    size: int = 128,
    is_selected: CaseFilter = all_cases,
) -> Iterator[Case]:
    """Yield a case for each size and storage, of float16 queries: dense ones beside torch, retrieval beside dense.

    Tokens are a multiple of the page, 64.
    """
    for rows, tokens, new_tokens, budget in (*((*shape, 0) for shape in sizes), *retrievals):
        for storage in storages:
            title = f"KVAttention {storage} {rows} x {tokens}, {new_tokens} new"
            title += f", retrieval of {budget}" if budget else ""
            if is_selected(title):
                yield _case(library, torch, device, title, rows, tokens, new_tokens, budget, storage, heads, size)


@dataclass(frozen=True)
class _Problem:
    """Tensors on a device, and what computes attention of them.

    Attributes:
        library: the C interface.
        torch: the module.
        device: of torch.
        query: float16 [rows, new, query heads x D].
        key: float16 [rows, new, KV heads x D].
        value: likewise.
        states: of each copy, by name.
        tokens: that each row has with the new ones.
    """

    library: ctypes.CDLL
    torch: Any
    device: str
    query: Any
    key: Any
    value: Any
    states: list[dict[str, Any]]
    tokens: int

    def runner(self, attrs: KVAttributes, y: Sequence[Any]) -> Callable[[int], None]:
        """Return what computes a copy into its tensor of ``y``."""
        new_tokens = self.query.shape[1]
        on_host = {
            "past": np.full(len(self.query), self.tokens - new_tokens),
            "fresh": np.full(len(self.query), new_tokens),
            "policies": np.array([attrs.policy(head) for head in range(attrs.kv_heads)], np.uint8),
        }
        calls = [self._call(attrs, on_host, state, out) for state, out in zip(self.states, y, strict=True)]
        scratch_bytes = self.library.graphopt_cuda_kv_attention_scratch(ctypes.byref(calls[0]))
        scratch = self.torch.empty(scratch_bytes + 16, dtype=self.torch.uint8, device=self.device)

        def run(copy: int, _arrays: object = (on_host, y)) -> None:
            calls[copy].scratch = scratch.data_ptr() + -scratch.data_ptr() % 16
            stream = stream_of(self.torch, self.device)
            interface.check(self.library.graphopt_cuda_kv_attention(ctypes.byref(calls[copy]), stream))

        return run

    def _call(self, attrs: KVAttributes, on_host: dict[str, Any], state: dict[str, Any], y: Any) -> Call:
        rows, new_tokens, width = self.key.shape
        call = Call(
            type=10, storage=STORAGES.index(attrs.storage), rows=rows, columns=new_tokens, kv_heads=attrs.kv_heads
        )
        call.group, call.size = self.query.shape[2] // width, width // attrs.kv_heads
        call.page, call.pages = attrs.page, self.tokens // attrs.page
        for name in ("sinks", "recent", "budget", "scale", "clip"):
            setattr(call, name, getattr(attrs, name))
        for name, array in on_host.items():
            setattr(call, name, array.ctypes.data)
        tensors = {"query": self.query, "key": self.key, "value": self.value, "y": y, **state}
        for name, tensor in tensors.items():  # the operator has a number `recent` too
            setattr(call, {"recent": "slots"}.get(name, name), tensor.data_ptr())
        return call

    def reference(self, attrs: KVAttributes, copy: int) -> Any:
        """Return y of a copy by float64, [rows, new, query heads x D]."""
        torch, state = self.torch, self.states[copy]
        rows, new_tokens, width = self.key.shape
        queries = _group_queries(self.query, attrs)
        keys, values = _tokens(torch, state, attrs.storage, width // attrs.kv_heads)
        hidden = torch.ones(new_tokens, self.tokens, dtype=torch.bool, device=self.device).triu(
            self.tokens - new_tokens + 1
        )
        if attrs.chooses:
            hidden = hidden | ~_read_tokens(torch, state["summaries"], queries, self.tokens, attrs)
        hidden = hidden.expand(rows, attrs.kv_heads, new_tokens, self.tokens)
        results = torch.empty_like(queries)
        for head in range(attrs.kv_heads):  # one at a time: scores of a prompt are gigabytes
            group_queries = queries[:, head].flatten(1, 2)
            scores = group_queries @ keys[:, head].mT * attrs.scale  # [rows, new token and head of the group, tokens]
            scores.masked_fill_(hidden[:, head].repeat_interleave(queries.shape[3], dim=-2), float("-inf"))
            results[:, head] = (torch.softmax(scores, dim=-1) @ values[:, head]).reshape(results[:, head].shape)
        return results.transpose(1, 2).reshape(rows, new_tokens, -1)


def _case(
    library: ctypes.CDLL,
    torch: Any,
    device: str,
    title: str,
    rows: int,
    tokens: int,
    new_tokens: int,
    budget: int,
    storage: str,
    heads: tuple[int, int],
    size: int,
) -> Case:
    dense = KVAttributes(kv_heads=heads[1], scale=size**-0.5, page=_PAGE, storage=storage)
    choice = replace(dense, policies=(RETRIEVAL,), sinks=_PAGE, recent=_PAGE, budget=budget // _PAGE)
    attrs = choice if budget else dense  # as self:retrieval drafts
    shapes = {name: tensor for name, tensor in attrs.state(rows, tokens // _PAGE, size)}  # noqa: C416 - no dict
    bytes_moved = shapes["keys"].bytes + shapes["values"].bytes + shapes["scales"].bytes
    if budget:
        bytes_moved = bytes_moved * (budget + 2 * _PAGE) // tokens + shapes["summaries"].bytes
    copies = copies_past_l2(torch, device, bytes_moved)

    def activations(width: int) -> Any:
        return torch.randn(rows, new_tokens, width * size, dtype=torch.float16, device=device)

    query, key, value = (activations(width) for width in (heads[0], heads[1], heads[1]))
    states = [
        {name: _random_state(torch, device, name, tensor) for name, tensor in shapes.items()} for _ in range(copies)
    ]
    if budget:
        for state in states:
            state["summaries"] = _decided_summaries(torch, _group_queries(query, attrs), tokens, attrs)
    problem = _Problem(library, torch, device, query, key, value, states, tokens)
    y = [torch.empty_like(query) for _ in range(copies)]

    def error(copy: int) -> float:
        reference = problem.reference(attrs, copy)
        return float((y[copy].double() - reference).norm() / reference.norm())

    def poison(copy: int) -> None:
        y[copy].fill_(float("nan"))

    rivals: dict[str, Callable[[int], Any]] = {}
    if budget:
        rivals["all tokens"] = problem.runner(dense, [torch.empty_like(query) for _ in range(copies)])
    elif device == "cuda":
        torch_caches = [
            torch.randn(2, rows, heads[1], tokens, size, dtype=torch.float16, device=device) for _ in range(copies)
        ]
        q = query.reshape(rows, new_tokens, heads[0], size).transpose(1, 2)
        attention = torch.nn.functional.scaled_dot_product_attention
        # few new tokens get no mask: it takes next to no time that a query also reads the tokens after it
        masks = import_module("torch.nn.attention.bias")
        mask = masks.causal_lower_right(new_tokens, tokens) if new_tokens > attrs.page else None
        rivals["torch attention, float16"] = lambda copy: attention(
            q, torch_caches[copy][0], torch_caches[copy][1], attn_mask=mask, enable_gqa=True
        )
    # half a unit in the last place of y, and the error of float32 sums over the tokens
    return Case(title, bytes_moved, copies, poison, problem.runner(attrs, y), error, 2**-10, rivals)


def _random_state(torch: Any, device: str, name: str, tensor: StateTensor) -> Any:
    """Return a random state: codes, halves, or floats; lows and steps are small."""
    if tensor.dtype == np.uint8:
        return torch.randint(0, 256, tensor.shape, dtype=torch.uint8, device=device)
    dtype = torch.float16 if tensor.dtype == np.float16 else torch.float32
    return torch.randn(tensor.shape, dtype=dtype, device=device) / (16 if name == "scales" else 1)


def _group_queries(query: Any, attrs: KVAttributes) -> Any:
    """Return queries as float64 [rows, KV heads, new, heads of a group, D]."""
    rows, new_tokens, width = query.shape
    size = round(attrs.scale**-2)  # scale is 1 / sqrt(D)
    return (
        query.double().reshape(rows, new_tokens, attrs.kv_heads, width // attrs.kv_heads // size, size).transpose(1, 2)
    )


def _page_scores(summaries: Any, queries: Any) -> Any:
    """Return the scores of pages by their bounds, the largest of a group's heads, float64 [rows, heads, new, pages].

    Args:
        summaries: least and largest keys, [rows, heads, pages, 2 D].
        queries: queries, float64 [rows, heads, new, group, D].
    """
    low, high = summaries.double().chunk(2, dim=-1)
    positive, negative = queries.clamp(min=0).flatten(2, 3), queries.clamp(max=0).flatten(2, 3)
    scores = positive @ high.mT + negative @ low.mT
    return scores.unflatten(2, queries.shape[2:4]).amax(dim=3)


def _choose_pages(torch: Any, summaries: Any, queries: Any, tokens: int, attrs: KVAttributes) -> tuple[Any, Any]:
    """Return the pages that queries choose, and the gap from the last of them to the next, relative to its score.

    A page is a candidate if it lies before the query and not every query reads it: not the first, nor the query's own.
    """
    scores = _page_scores(summaries, queries)
    pages, new_tokens = torch.arange(scores.shape[-1], device=scores.device), queries.shape[2]
    position = torch.arange(tokens - new_tokens, tokens, device=scores.device)[:, None]
    # every query reads the newest 64 tokens: a page that begins after the first of these has no other token
    is_candidate = (pages >= 1) & (pages * _PAGE <= position - _PAGE)
    scores = scores.masked_fill(~is_candidate, float("-inf"))
    best = scores.topk(attrs.budget + 1, dim=-1)
    gaps = (best.values[..., -2] - best.values[..., -1]) / best.values[..., -2].abs()
    return best.indices[..., :-1], gaps


def _decided_summaries(torch: Any, queries: Any, tokens: int, attrs: KVAttributes) -> Any:
    """Return random bounds by which float32 and float64 choose the same pages: drawn again if scores nearly tie."""
    rows, heads, _, _, size = queries.shape
    while True:
        # of 64 normal numbers the largest is near 2.4
        bounds = torch.randn(rows, heads, tokens // _PAGE, 2 * size, device=queries.device).abs() / 2 + 2
        bounds[..., :size].neg_()
        if _choose_pages(torch, bounds, queries, tokens, attrs)[1].min() > 1e-6 * size**0.5:
            return bounds


def _read_tokens(torch: Any, summaries: Any, queries: Any, tokens: int, attrs: KVAttributes) -> Any:
    """Return a mask of the tokens that each query reads, later ones not excluded, bool [rows, heads, new, tokens]."""
    pages, _ = _choose_pages(torch, summaries, queries, tokens, attrs)
    new_tokens = queries.shape[2]
    is_chosen = torch.zeros(*pages.shape[:-1], tokens // _PAGE, dtype=torch.bool, device=pages.device)
    is_chosen.scatter_(-1, pages, True)
    position = torch.arange(tokens, device=pages.device)
    newest = torch.arange(tokens - new_tokens, tokens, device=pages.device)[:, None]
    is_always_read = (position < _PAGE) | (
        position > newest - _PAGE
    )  # the first page, and as many of the newest tokens
    return is_chosen.repeat_interleave(_PAGE, dim=-1) | is_always_read


def _tokens(torch: Any, state: dict[str, Any], storage: str, size: int) -> tuple[Any, Any]:
    """Return keys and values, float64 [rows, heads, tokens, size]; the last page of codes is in its slot."""
    keys, values = state["keys"], state["values"]
    rows, heads, pages = keys.shape[:3]
    if storage == "float16":
        keys = keys.double().reshape(rows, heads, pages, 4, size, 16).transpose(-1, -2)
        return keys.reshape(rows, heads, -1, size), values.double().reshape(rows, heads, -1, size)

    def unpack(codes: Any, lanes: int, depth: int) -> Any:
        fours = codes.reshape(rows, heads, pages, lanes // 16, -1, 16, 4)
        if storage == "int4":
            fours = torch.stack([fours & 15, fours >> 4], dim=-3).flatten(-4, -3)
        return fours.transpose(-2, -3).reshape(rows, heads, pages, lanes, depth).double()

    low, step, value_low, value_step = state["scales"].double().split([size, size, 64, 64], dim=-1)
    keys = low[..., None, :] + step[..., None, :] * unpack(keys, 64, size)
    values = value_low[..., None] + value_step[..., None] * unpack(values, size, 64).mT
    newest = state["recent"].double().reshape(rows, heads, 2, 64, size)
    keys[:, :, -1], values[:, :, -1] = newest[:, :, 0], newest[:, :, 1]
    return keys.reshape(rows, heads, -1, size), values.reshape(rows, heads, -1, size)
