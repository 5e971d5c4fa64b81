"""Time attention of many requests over a shared pool of blocks, beside attention over pages of each request.

    python tools/bench/paged.py                                     # decoding and prompts; minutes
    python tools/bench/paged.py --past 4k --storages int8,int4 --blocks 16
    python tools/bench/paged.py --past 4128 --prefix '' --storages int4,int4-residuals --blocks 64     # half a block
    python tools/bench/paged.py --past '' --prefix 16k              # ten requests with a common prefix, and without

`PagedAttention` finds blocks through a table, in random order; `KVAttention` reads the same float32 numbers from pages
of 64 tokens of each row. Each time is the median of interleaved rounds, each ratio the median of the rounds' own ratios
to the first line; on a busy machine compare processor time. A call goes through several pools, together four times the
last-level cache. The error is the largest difference of y from that of the first line, relative to the largest number
there.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import onnx_ir as ir
import typer

# Run as a script, Python looks for modules in tools/ only.
sys.path.insert(0, str(Path(__file__).parents[2]))
from graphopt.inference.states.large_pages import aligned_zeros
from graphopt.ort.session import open_session, ort_value
from graphopt.runtime_ops import OPERATORS, declare
from graphopt.runtime_ops.kv_attention.spec.attributes import KVAttributes
from graphopt.runtime_ops.kv_attention.spec.layout import pack_keys, pack_values
from graphopt.runtime_ops.paged_attention.spec.layout import (
    first_with_residual,
    pack,
    residual_slots,
    restore_tokens,
    store_tokens,
)
from tools.bench.parts.machine import OtherLoad, describe, last_level_cache, quiet
from tools.bench.parts.onnxruntime_engines import STOP_SPINNING
from tools.bench.parts.options import Rounds, Threads, token_count, token_counts

Array = np.ndarray[Any, np.dtype[Any]]
RESIDUALS = "-residuals"
_PAGE = 64


@dataclass(frozen=True)
class Work:
    """Requests of one step: tokens that each has stored, new tokens, and their common prefix.

    Attributes:
        past: tokens that each request has stored.
        new: tokens that each gets.
        heads: query heads.
        kv_heads: KV heads.
        size: of a head.
        prefix: tokens that all requests share, a part of the past.
    """

    past: int
    new: int
    requests: int
    heads: int
    kv_heads: int
    size: int
    prefix: int = 0

    @property
    def pages(self) -> int:
        """Pages of 64 tokens of a request."""
        return -(-(self.past + self.new) // _PAGE)

    @property
    def bytes(self) -> int:
        """Bytes of keys and values as float32."""
        return 8 * self.requests * self.pages * _PAGE * self.kv_heads * self.size

    def numbers(self) -> Array:
        """Return keys and values, float32 [2, request, page, head, token, channel]."""
        shape = (2, self.requests, self.pages, self.kv_heads, _PAGE, self.size)
        numbers = np.random.default_rng(0).standard_normal(shape, np.float32)
        numbers[:, :, : self.prefix // _PAGE] = numbers[:, :1, : self.prefix // _PAGE]
        return numbers

    def tokens(self) -> dict[str, Array]:
        """Return query, key and value, float32 [request, token, channels]."""
        generator = np.random.default_rng(1)
        across = {"query": self.heads, "key": self.kv_heads, "value": self.kv_heads}
        shape = (self.requests, self.new)
        return {name: generator.standard_normal((*shape, n * self.size), np.float32) for name, n in across.items()}


class Engine:
    """A session of one node, and pools that its calls go through in turn."""

    def __init__(self, node: str, attributes: dict[str, Any], feeds: dict[str, Array], pools: dict[str, Array]) -> None:
        """Open a session; ``pools`` come back as outputs in the same memory."""
        self.name, self._feeds, self._copies = node, feeds, [pools]
        operator = OPERATORS[node]
        values = {
            name: ir.val(name, ir.DataType.from_numpy(array.dtype), ir.Shape(array.shape))
            for name, array in {**feeds, **pools}.items()
        }
        op_node = operator.node(values, attributes, name=node)
        for name, value in zip(operator.schema.output_names, op_node.outputs, strict=True):
            value.name = f"made_{name}"
        graph = ir.Graph(
            list(values.values()), op_node.outputs, nodes=[op_node], opset_imports={"": 23}, name="attention"
        )
        self._model = ir.Model(graph, ir_version=11)
        declare(self._model)
        self._outputs = operator.schema.output_names

    def open(self, copies: int, threads: int) -> Callable[[], Array]:
        """Return a function that runs a step over each of ``copies`` pools and returns the last y."""
        first = self._copies[0]
        self._copies += [{name: _copy(array) for name, array in first.items()} for _ in range(copies - 1)]
        with tempfile.TemporaryDirectory() as folder:
            ir.save(self._model, Path(folder) / "model.onnx")
            session = open_session(Path(folder) / "model.onnx", entries=STOP_SPINNING, threads=threads)
        steps = []
        for pools in self._copies:
            binding = session.io_binding()
            values = {name: ort_value(array) for name, array in {**self._feeds, **pools}.items()}
            for name, value in values.items():
                binding.bind_ortvalue_input(name, value)
            for name in self._outputs:
                pool = name.removeprefix("new_")
                if pool in pools and pools[pool].size:
                    binding.bind_ortvalue_output(f"made_{name}", values[pool])
                else:
                    binding.bind_output(f"made_{name}", "cpu")
            steps.append(binding)

        def run() -> Array:
            for binding in steps:
                session.run_with_iobinding(binding)
            y: Array = steps[-1].get_outputs()[0].numpy()
            return y

        return run


def _copy(array: Array) -> Array:
    copy = aligned_zeros(array.shape, array.dtype)
    copy[...] = array
    return copy


def rows(work: Work, numbers: Array) -> Engine:
    """Return ``KVAttention`` over pages of each row."""
    attrs = KVAttributes(kv_heads=work.kv_heads, scale=work.size**-0.5, page=_PAGE)
    pools = dict(attrs.state(work.requests, work.pages, work.size).zeros())
    for name, pack_page, array in zip(("keys", "values"), (pack_keys, pack_values), numbers, strict=True):
        pools[name] = _copy(pack_page(array.swapaxes(1, 2), "float32"))
    count = np.full(work.requests, work.new)
    feeds = {**work.tokens(), "past": np.full(work.requests, work.past), "new": count}
    feeds |= dict.fromkeys(("sink_logits", "sink_query"), np.zeros(0, np.float32))
    return Engine("KVAttention", attrs.for_node(), feeds, pools)


def blocks(work: Work, numbers: Array, storage: str, block: int, *, share: bool = False) -> Engine:
    """Return ``PagedAttention`` over blocks in any order.

    Args:
        work: what it computes.
        numbers: of keys and values.
        storage: of the blocks; with :data:`RESIDUALS` behind it the newest tokens have second codes.
        block: tokens of a block.
        share: whether requests name the same blocks for their prefix.
    """
    storage, has_residuals = storage.removesuffix(RESIDUALS), storage.endswith(RESIDUALS)
    if block > _PAGE:
        numbers = _longer_pages(numbers, block // _PAGE)
    page = numbers.shape[4]
    parts = page // block
    columns = numbers.shape[2] * parts
    table = np.random.default_rng(2).permutation(work.requests * columns).reshape(work.requests, columns)
    pools: dict[str, Array] = {}
    for name, pool_numbers in zip(("keys", "values"), numbers, strict=True):
        codes, scales = store_tokens(pool_numbers, storage)
        if has_residuals and scales is not None:
            _put_residuals(pool_numbers, codes, scales, storage, block, work.past)
        # request, page, head, part, token of the block, ... -> block, head, token of the block, ...
        split = codes.reshape(*codes.shape[:3], parts, block, work.size).swapaxes(2, 3)
        block_order = split.reshape(-1, work.kv_heads, block, work.size)
        pool = np.empty_like(block_order)
        pool[table.ravel()] = block_order
        pools[name] = _copy(pack(pool, storage, are_keys=name == "keys"))
        steps: Array = np.zeros(0, np.float32)
        if scales is not None:
            block_scales = (
                scales.reshape(*scales.shape[:3], parts, block).swapaxes(2, 3).reshape(-1, work.kv_heads, block)
            )
            head_scales = np.empty_like(block_scales)
            head_scales[table.ravel()] = block_scales
            steps = head_scales.reshape(-1, block, work.kv_heads)
        pools[f"{name[:-1]}_scales"] = steps
    if share:
        table[:, : work.prefix // block] = table[0, : work.prefix // block]
    feeds: dict[str, Array] = {
        name: array.reshape(work.requests * work.new, -1) for name, array in work.tokens().items()
    }
    feeds |= {
        "starts": (np.arange(work.requests + 1) * work.new).astype(np.int32),
        "past": np.full(work.requests, work.past, np.int32),
        "block_table": table.astype(np.int32),
        "sink_logits": np.zeros(0, np.float32),
    }
    attributes = {"kv_heads": work.kv_heads, "window": 0, "scale": work.size**-0.5, "softcap": 0.0, "storage": storage}
    attributes |= {"residuals": 1} if has_residuals else {}
    return Engine("PagedAttention", attributes, feeds, pools)


def _longer_pages(numbers: Array, count: int) -> Array:
    """Return numbers [2, request, page, head, token, channel] with ``count`` pages in one, the last filled up."""
    shape = numbers.shape
    padding = np.zeros((*shape[:2], -shape[2] % count, *shape[3:]), numbers.dtype)
    pages = np.concatenate([numbers, padding], axis=2).reshape(*shape[:2], -1, count, *shape[3:])
    return pages.swapaxes(3, 4).reshape(*shape[:2], -1, shape[3], count * shape[4], shape[5])


def _put_residuals(numbers: Array, page_codes: Array, scales: Array, storage: str, block: int, past: int) -> None:
    """Give the newest of ``past`` tokens, of pages [requests, pages, heads, tokens, size], second codes."""
    page_size = numbers.shape[3]
    page, stored_count, target_slots = past // page_size, past % block, residual_slots(block)
    begin = past % page_size - stored_count
    kept_tokens = np.arange(max(0, first_with_residual(stored_count, block)), stored_count)
    tokens = numbers[:, page, :, begin + kept_tokens].astype(np.float32)
    first = restore_tokens(
        page_codes[:, page, :, begin + kept_tokens], scales[:, page, :, begin + kept_tokens], storage
    )
    codes, steps = store_tokens(tokens - first, storage)
    page_codes[:, page, :, begin + target_slots[kept_tokens]], scales[:, page, :, begin + target_slots[kept_tokens]] = (
        codes,
        steps,
    )


def compare(title: str, work: Work, engines: dict[str, Engine], rounds: int, threads: int) -> None:
    """Print the time of a step by each engine, and its ratio to that of the first."""
    copies = max(1, -(-4 * last_level_cache() // work.bytes))
    run = {name: engine.open(copies, threads) for name, engine in engines.items()}
    reference = next(iter(run.values()))().ravel()
    errors = {
        name: float(np.abs(call().ravel() - reference).max() / np.abs(reference).max()) for name, call in run.items()
    }
    times: dict[str, list[float]] = {name: [] for name in run}
    processor_times: dict[str, list[float]] = {name: [] for name in run}
    load, order = OtherLoad(), list(run)
    for _ in range(rounds):
        random.shuffle(order)
        for name in order:
            begin, processor_begin = time.perf_counter(), time.process_time()
            run[name]()
            times[name].append((time.perf_counter() - begin) / copies)
            processor_times[name].append((time.process_time() - processor_begin) / copies)
    print(f"\n{title}; {copies} pools; {quiet(load.share())}")
    for name in run:
        line = f"  {name:24}"
        for unit, samples in (("ms", times), ("ms of processors", processor_times)):
            own_times, first = samples[name], next(iter(samples.values()))
            ratio = statistics.median(
                seconds / first_seconds for seconds, first_seconds in zip(own_times, first, strict=True)
            )
            line += f" {1e3 * statistics.median(own_times):9.2f} {unit} {ratio:5.2f}x"
        print(f"{line}  error {errors[name]:.1e}")


def main(
    past: Annotated[str, typer.Option(help="tokens that each request has stored; empty for none")] = "4k,16k,64k",
    requests: Annotated[int, typer.Option(min=1)] = 8,
    prompt: Annotated[int, typer.Option(min=0, help="new tokens of each request of a prompt; 0 for none")] = 256,
    prefix: Annotated[str, typer.Option(help="tokens that ten requests share; empty for none")] = "16k",
    heads: Annotated[int, typer.Option(min=1, help="query heads")] = 8,
    kv_heads: Annotated[int, typer.Option(min=1)] = 2,
    size: Annotated[int, typer.Option(min=16, help="of a head")] = 64,
    storages: Annotated[str, typer.Option(help="of blocks; int4-residuals has second codes")] = "float32",
    block_sizes: Annotated[str, typer.Option("--blocks", help="tokens of a block")] = "16,64",
    rounds: Rounds = 9,
    threads: Threads = 2,
) -> None:
    """Time decoding, prompts, and requests that share a prefix."""
    print(f"{describe()}; {threads} threads, {rounds} rounds; {heads} heads, {kv_heads} KV heads of {size}")
    variants = [(storage, int(block)) for storage in storages.split(",") for block in block_sizes.split(",")]
    for count in token_counts(past):
        for new in (1, prompt):
            if not new:
                continue
            work = Work(count - new, new, requests if new == 1 else 2, heads, kv_heads, size)
            numbers = work.numbers()
            engines = {"KVAttention": rows(work, numbers)}
            for storage, block in variants:
                engines[f"{storage}, blocks of {block}"] = blocks(work, numbers, storage, block)
            del numbers
            title = f"{work.requests} requests, {new} new of {count} tokens each"
            compare(title, work, engines, rounds, threads)
    if prefix:
        count = token_count(prefix)
        work = Work(count + _PAGE - 1, 1, 10, heads, kv_heads, size, count)
        numbers = work.numbers()
        for storage, block in variants:
            engines = {"each reads its own": blocks(work, numbers, storage, block)}
            engines["one prefix"] = blocks(work, numbers, storage, block, share=True)
            title = f"10 requests, {count} tokens in common, {storage}, blocks of {block}"
            compare(title, work, engines, rounds, threads)


if __name__ == "__main__":
    typer.run(main)
