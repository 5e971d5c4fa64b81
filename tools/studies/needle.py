"""Find a fact that was planted in a long context, through the operator ``KVAttention`` in onnxruntime.

    python tools/studies/needle.py                                  # 4k to 128k tokens; a minute on two cores
    python tools/studies/needle.py --storage int4 --page 64
    python tools/studies/needle.py --contexts '' --margins          # from which margin on a needle is chosen

One key in the context, the needle, is close to the query of the step; all others are random, of the same norm. Its
value is of +1 and -1, and it counts as found if attention returns that, each number within 0.1. So this tests whether a
policy reads the right page, not whether a model would look for it. Dense attention must find it everywhere, streaming
among its first and newest tokens only (StreamingLLM, Xiao et al. 2024), retrieval wherever the summary of its page
scores high enough (Quest, Tang et al. 2024).

The margin of a needle is its score less the mean score of the others, in their standard deviations. The score of the
mean key of a page of T tokens has 1 / sqrt(T) of that: 64 tokens reduce it to an eighth. Bounds do not average: they
show by how much the needle exceeds the largest of T numbers, channel by channel. That needs a query with large
channels, as those of models are; where the query is spread evenly, as after a Hadamard, hardly any channel of a needle
exceeds the others. `--margins` measures this: the least margin at which 99% of the pages with a needle are within the
budget.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import typer
from rich.console import Console
from rich.table import Column, Table

# Run as a script, Python looks for modules in tools/ only.
sys.path.insert(0, str(Path(__file__).parents[2]))
from graphopt.ort.session import open_session
from graphopt.runtime_ops import DOMAIN, declare
from graphopt.runtime_ops.kv_attention.spec.attributes import (
    DENSE,
    LEVELS,
    PAGES,
    RETRIEVAL,
    STORAGES,
    STREAMING,
    KVAttributes,
)
from graphopt.runtime_ops.kv_attention.spec.policies.retrieval import Retrieval
from graphopt.runtime_ops.kv_attention.spec.storages import STORAGE_OF
from tools.bench.parts.haystack import Haystack, Needle, question, summaries
from tools.bench.parts.options import JsonFile, token_counts

Array = npt.NDArray[Any]

POLICIES: dict[str, dict[str, Any]] = {
    "dense": {"policies": (DENSE,)},
    "streaming": {"policies": (STREAMING,)},
    "retrieval, bounds": {"policies": (RETRIEVAL,), "summary": "bounds"},
    "retrieval, mean": {"policies": (RETRIEVAL,), "summary": "mean"},
}
TOLERANCE = 0.1
"""How far each number of y may be from +1 or -1: a missed needle gives an average over others, which is near 0."""

_KV_HEADS = 2
_STATE = ("keys", "values", "scales", "recent", "summaries")
_SHARE, _TRIALS, _CONTEXT = 0.99, 200, 1 << 15
_MARGINS = np.arange(1.0, 61.0)
_CHANNELS = (4, 16, 64)


def main(
    contexts: Annotated[str, typer.Option(help="tokens before the step; empty for none")] = "4k,16k,64k,128k",
    depths: Annotated[int, typer.Option(min=2, help="where needles lie, from the first token to the newest")] = 11,
    trials: Annotated[int, typer.Option(min=2, help="needles at each depth, each of a head of its own")] = 8,
    storage: Annotated[str, typer.Option(help=f"one of {', '.join(STORAGES)}")] = "float32",
    page: Annotated[int, typer.Option(help="tokens of a page")] = 16,
    sinks: Annotated[int, typer.Option(min=0, help="first tokens that streaming and retrieval read")] = 64,
    recent: Annotated[int, typer.Option(min=1, help="newest tokens that they read")] = 256,
    budget: Annotated[int, typer.Option(min=0, help="further tokens that retrieval reads")] = 1024,
    size: Annotated[int, typer.Option(min=16, max=256, help="of a head")] = 128,
    cosine: Annotated[float, typer.Option(min=0.1, max=1, help="of a needle and its query")] = 0.9,
    channels: Annotated[int, typer.Option(min=1, help="that a query uses")] = 16,
    common: Annotated[float, typer.Option(min=0, max=0.99, help="share of a key that all keys have")] = 0.75,
    margins: Annotated[bool, typer.Option(help="also the margins from which on needles are found")] = False,
    json_file: JsonFile = None,
) -> None:
    """Plant needles, ask for each, print how many of them each policy finds."""
    if storage not in STORAGES or page not in PAGES or size % 16:
        raise typer.BadParameter(f"storage is one of {STORAGES}, page one of {PAGES}, size a multiple of 16")
    unit = STORAGE_OF[storage].unit if storage in LEVELS else 1
    if page % unit or size % unit:
        raise typer.BadParameter(f"{storage} packs {unit} numbers at a time: page and size are multiples of {unit}")
    needle, counts = Needle(cosine, channels, common), token_counts(contexts)
    if 0 in counts:
        raise typer.BadParameter("a context of no tokens has no room for a needle")
    float_pages = int(storage.startswith("int"))
    attrs = KVAttributes(
        kv_heads=_KV_HEADS,
        scale=1 / math.sqrt(size),
        page=page,
        storage=storage,
        sink_pages=float_pages,
        recent_pages=float_pages,
        sinks=sinks,
        recent=recent,
        budget=-(-budget // page),
    )
    console, rows = Console(), []
    if counts:
        depth_names = [f"{100 * index / (depths - 1):.0f}" for index in range(depths)]
        names = [Column(name, no_wrap=True) for name in ("tokens", "policy", *depth_names)]
        table = Table(*names, title=f"needles found of {trials}, by depth in percent")
        for context in counts:
            hits = search(attrs, size, context, depths, trials, needle)
            for name, policy_hits in hits.items():
                table.add_row(str(context), name, *map(str, policy_hits))
                rows.append({"context": context, "policy": name, "found": policy_hits, "of": trials})
        console.print(table)
        console.print(f"margin: {needle.margin(size):.1f} standard deviations", highlight=False)
    margin_rows = _margins(size, _CONTEXT, budget, console) if margins else []
    if json_file is not None:
        report = {"margin": needle.margin(size), "rows": rows, "margins": margin_rows}
        json_file.write_text(json.dumps(report, indent=2) + "\n")


def search(
    attrs: KVAttributes, size: int, context: int, depths: int, trials: int, needle: Needle
) -> dict[str, list[int]]:
    """Return for each policy how many needles it finds at each depth.

    Args:
        attrs: of the operator, whatever the policy.
        size: of a head.
        context: tokens before the step that asks, which is of one token for each depth.
        depths: evenly spaced, from the first token to the newest.
        trials: needles at each depth.
        needle: how they differ from the rest.
    """
    positions = np.linspace(0, context - 1, depths).astype(np.int64)
    hits = {name: np.zeros(depths, np.int64) for name in POLICIES}
    for first in range(0, trials, attrs.kv_heads):
        haystack = Haystack(attrs.kv_heads, size, positions, needle, seed=first)
        used_heads = min(attrs.kv_heads, trials - first)
        for name, y in answers(attrs, haystack, context).items():
            distances = np.abs(y - haystack.needle_values.swapaxes(0, 1)).max(axis=-1)
            hits[name] += (distances[:, :used_heads] < TOLERANCE).sum(axis=1)
    return {name: counts.tolist() for name, counts in hits.items()}


def answers(attrs: KVAttributes, haystack: Haystack, context: int) -> dict[str, Array]:
    """Return the output of each policy of :data:`POLICIES` in onnxruntime: float32 [needles, Hk, D].

    The cache of ``context`` tokens is the same for all; only its summaries depend on the policy.
    """
    feeds = question(attrs, haystack, context, threads=2)
    outputs: dict[str, Array] = {}
    for name, policy in POLICIES.items():
        policy_attrs = replace(attrs, **policy)
        (y,) = _run(policy_attrs, feeds | {"summaries": summaries(policy_attrs, haystack, context, threads=2)})
        outputs[name] = y.reshape(len(haystack.positions), haystack.kv_heads, haystack.size)
    return outputs


def _run(attrs: KVAttributes, feeds: Mapping[str, Array]) -> Sequence[Array]:
    """Return y of a graph of one node."""
    values = [
        ir.val(name, ir.DataType.from_numpy(array.dtype), ir.Shape([None] * array.ndim if array.size else array.shape))
        for name, array in feeds.items()
    ]
    node = ir.node("KVAttention", values, attrs.for_node(), domain=DOMAIN, version=None, num_outputs=6, name="needle")
    for output, name in zip(node.outputs, ("y", *_STATE), strict=True):
        output.name = f"new_{name}"
    node.outputs[0].type, node.outputs[0].shape = values[0].type, values[0].shape
    model = ir.Model(ir.Graph(values, node.outputs[:1], nodes=[node], opset_imports={"": 23}), ir_version=11)
    declare(model)
    with tempfile.TemporaryDirectory(prefix="graphopt-needle-") as folder:
        ir.save(model, Path(folder) / "model.onnx")
        outputs: Sequence[Array] = open_session(Path(folder) / "model.onnx", threads=2).run(None, dict(feeds))
    return outputs


def least_margin(page: int, summary: str, channels: int, size: int, context: int, budget: int) -> float | None:
    """Return the least margin at which 99% of the pages with a needle are chosen, or ``None`` if none of 60 is enough.

    Keys are normal numbers of standard deviation 1, queries unit vectors of ``channels`` equal channels. A needle is
    such a key that is moved along its query to the margin; it takes the place of a token of a random page.
    """
    random = np.random.default_rng([page, channels, size])
    keys = random.standard_normal((context // page, page, size), np.float32)
    attrs = KVAttributes(kv_heads=1, scale=1.0, page=page, policies=(RETRIEVAL,), summary=summary)
    page_summaries, hits = _summaries(keys, summary), np.zeros(len(_MARGINS), np.int64)
    page_budget = -(-budget // page)
    for _ in range(_TRIALS):
        query = np.zeros(size)
        query[random.permutation(size)[:channels]] = random.choice([-1, 1], channels) / math.sqrt(channels)
        page_index = int(random.integers(len(keys)))
        other_scores = np.sort(np.delete(Retrieval.of(attrs).page_scores(page_summaries, query[None]), page_index))[
            ::-1
        ]
        needle_keys = np.repeat(keys[None, page_index], len(_MARGINS), axis=0).astype(np.float64)
        needle_keys[:, 0] += (_MARGINS - needle_keys[:, 0] @ query)[:, None] * query
        threshold = other_scores[page_budget - 1] if page_budget <= len(other_scores) else -np.inf
        hits += Retrieval.of(attrs).page_scores(_summaries(needle_keys, summary), query[None]) > threshold
    sufficient = np.flatnonzero(hits >= _SHARE * _TRIALS)
    return float(_MARGINS[sufficient[0]]) if len(sufficient) else None


def _summaries(pages: Array, summary: str) -> Array:
    """Return the summaries of full pages of keys [n, T, D]."""
    result: Array = pages.mean(axis=1)
    if summary == "bounds":
        result = np.concatenate([pages.min(axis=1), pages.max(axis=1)], axis=-1)
    return result


def _margins(size: int, context: int, budget: int, console: Console) -> list[dict[str, Any]]:
    channels = [*(count for count in _CHANNELS if count < size), size]
    heading = [f"bounds, {count} channels" for count in channels]
    title = f"margin from which on {_SHARE:.0%} are found: {budget} of {context} tokens, heads of {size}"
    table, margin_rows = Table("page", "mean", *heading, title=title), []
    for page in PAGES:
        mean_margin = least_margin(page, "mean", size, size, context, budget)
        bounds_margins = [least_margin(page, "bounds", count, size, context, budget) for count in channels]
        table.add_row(
            str(page), *("none" if margin is None else f"{margin:.0f}" for margin in (mean_margin, *bounds_margins))
        )
        margin_rows.append(
            {"page": page, "mean": mean_margin, "bounds": dict(zip(channels, bounds_margins, strict=True))}
        )
    console.print(table)
    return margin_rows


if __name__ == "__main__":
    typer.run(main)
