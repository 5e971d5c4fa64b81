"""What the heads of a model read: measured on a text and on random tokens that repeat.

::

    text ---------> windows --+
                              v
    random tokens ---------> model -> queries and keys of each layer -> attention per head
                                                                         |- share that a policy keeps
                                                                         +- echo and induction scores
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from graphopt.analysis.structure.heads import Calibration, HeadFigures, LayerFigures, ReadPolicy
from graphopt.artifact import artifact as artifacts
from graphopt.artifact.artifact import Artifact, origin_of
from graphopt.artifact.tokens import beginning_of, tokenizer_among
from graphopt.compile.calibration.mass import policy_shares
from graphopt.compile.calibration.razor import REPEATS, Repetition, echo_and_induction
from graphopt.compile.calibration.tap import Tap, tap
from graphopt.errors import InputError
from graphopt.passes.cache.sparse_kv import SparseKV, node_attributes
from graphopt.runtime_ops.kv_attention.spec.policies import POLICIES
from graphopt.util.progress import Progress, silent

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from graphopt.analysis.structure.paged_caches import PagedLayer
    from graphopt.runtime_ops.kv_attention.spec.attributes import KVAttributes
    from graphopt.tasks.ports import IntArray

LARGEST_WINDOW = 2048
"""Tokens of a window by default: queries and keys of all layers are in memory at once."""

_UNKNOWN_POSITIONS = 1024
_FEWEST = 64


def calibrate(
    model: str | Path | Artifact,
    text: str,
    *,
    streaming: SparseKV | None = None,
    retrieval: SparseKV | None = None,
    window: int | None = None,
    windows: int = 8,
    queries: int = 64,
    seed: int = 0,
    on_stage: Progress = silent,
) -> Calibration:
    """Measure what each head reads.

    Args:
        model: an artifact folder or an ``.onnx`` file, with a tokenizer; its heads must read everything.
        text: what it is to read; its windows are spaced evenly over it.
        streaming: what streaming reads; by default the options of the step ``sparse_kv``.
        retrieval: what retrieval reads, measured with both summaries.
        window: tokens of a window; by default the model's positions, at most :data:`LARGEST_WINDOW`.
        windows: how many at most.
        queries: of each window's second half, of which the attention of each head is measured, evenly spaced.
        seed: of the random tokens.
        on_stage: called when a stage begins.

    Raises:
        InputError: the model or the text cannot be used.
    """
    source = model if isinstance(model, Artifact) else artifacts.read(model)
    streaming = SparseKV(policy="streaming") if streaming is None else streaming
    retrieval = SparseKV(policy="retrieval") if retrieval is None else retrieval
    options = {"streaming": streaming}
    options |= {
        f"retrieval, {summary}": retrieval.model_copy(update={"summary": summary}) for summary in ("bounds", "mean")
    }
    tokenizer = tokenizer_among(source.companions)
    ids = np.array(tokenizer.encode(text).ids, np.int64)
    positions = source.manifest.model.max_positions or _UNKNOWN_POSITIONS
    window = min(positions, LARGEST_WINDOW, len(ids)) if window is None else window
    if not _FEWEST <= window <= min(positions, len(ids)):
        raise InputError(
            f"a window of {window} tokens is none of {_FEWEST} to {min(positions, len(ids))}, "
            f"as the text has {len(ids)} and the model {positions} positions",
            remedy="give a longer text, or another window",
        )
    on_stage("opening the model")
    with tap(source) as tapped_model:
        vocabulary = tapped_model.interface.vocabulary or tokenizer.get_vocab_size()
        if ids.max() >= vocabulary:
            raise InputError(
                f"there is no token {ids.max()} in a vocabulary of {vocabulary}",
                remedy="is this the tokenizer that the model was trained with?",
            )
        starts = np.unique(np.linspace(0, len(ids) - window, windows).astype(np.int64))
        query_positions = np.unique(np.linspace(window // 2, window - 1, queries).astype(np.int64))
        parts = [ids[start : start + window] for start in starts]
        shares = _shares(tapped_model, parts, query_positions, options, on_stage)
        on_stage("reading random tokens that repeat", len(parts), len(parts) + 1)
        repetition = Repetition.draw(beginning_of(tokenizer), vocabulary, min(positions, LARGEST_WINDOW), seed)
        scores = _scores(tapped_model, repetition, queries)
        layers, windowed_layers = (
            [tapped_layer.layer for tapped_layer in tapped_model.layers],
            tapped_model.windowed_layers,
        )
    return Calibration(
        origin=origin_of(source),
        model=source.manifest.source.name,
        tokens=window * len(parts),
        window=window,
        queries=len(parts) * len(query_positions),
        block=repetition.block,
        repeats=REPEATS,
        policies={name: _policy(options[name], policy_shares) for name, policy_shares in shares.items()},
        layers=tuple(_figures(layer, shares, scores) for layer in layers),
        windowed=windowed_layers,
    )


Shares = dict[str, dict[tuple[int, int], tuple[np.ndarray[Any, Any], float]]]
"""By policy, layer and KV head: the mass that each query head keeps, float64 [G], and the share of tokens read."""


def attributes_of(layer: PagedLayer, options: SparseKV) -> KVAttributes:
    """Return what the operator's attributes would be if all heads of the layer did as ``options`` say."""
    attributes = node_attributes(options.model_copy(update={"compensate": False}), [options.policy])
    page = options.page or layer.attributes.page
    return replace(layer.attributes, page=page, storage="float32", value_storage="", **attributes)


def _shares(
    tapped_model: Tap,
    parts: list[IntArray],
    query_positions: IntArray,
    options: Mapping[str, SparseKV],
    on_stage: Progress,
) -> Shares:
    """Return the means over the windows of text."""
    sums: Shares = {name: {} for name in options}
    for number, part in enumerate(parts):
        on_stage("reading the text", number, len(parts) + 1)
        for heads in tapped_model.run(part):
            layer = heads.tapped_layer.layer
            attributes = {name: attributes_of(layer, policy) for name, policy in options.items()}
            for head, of_head in enumerate(policy_shares(heads, query_positions, attributes)):
                for name, share in of_head.items():
                    mass, read_share = sums[name].get((layer.number, head), (0.0, 0.0))
                    mean = share.mass.mean(axis=0) / len(parts), float(share.read_share.mean()) / len(parts)
                    sums[name][layer.number, head] = (mass + mean[0], read_share + mean[1])
    return sums


def _scores(tapped_model: Tap, repetition: Repetition, queries: int) -> dict[tuple[int, int], np.ndarray[Any, Any]]:
    query_positions = repetition.query_positions(queries)
    return {
        (heads.tapped_layer.layer.number, head): echo_and_induction(heads, head, repetition, query_positions)
        for heads in tapped_model.run(repetition.ids)
        for head in range(len(heads.keys))
    }


def _policy(options: SparseKV, shares: Mapping[tuple[int, int], tuple[np.ndarray[Any, Any], float]]) -> ReadPolicy:
    names = {"policy", "sinks", "recent"}
    policy = POLICIES[options.policy].of_options(dict(options))
    if policy.chooses:
        names |= {"page", *(parameter.name for parameter in policy.parameters())}
    attributes = options.model_dump(include=names, exclude_none=True)
    read_shares = [share[1] for share in shares.values()]
    mass = np.concatenate([share[0] for share in shares.values()])  # heads of a model have groups of one size
    return ReadPolicy(attributes=attributes, read=float(np.mean(read_shares)), kept=float(mass.mean()))


def _figures(layer: PagedLayer, shares: Shares, scores: Mapping[tuple[int, int], np.ndarray[Any, Any]]) -> LayerFigures:
    heads = []
    for head in range(layer.attributes.kv_heads):
        key = (layer.number, head)
        echo, induction = scores[key].tolist()
        masses = {name: tuple(policy_shares[key][0].tolist()) for name, policy_shares in shares.items()}
        heads.append(HeadFigures(induction=induction, echo=echo, kept=masses))
    return LayerFigures(number=layer.number, heads=tuple(heads))
