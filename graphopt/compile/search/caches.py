"""Storages of caches by layer: keys and values of each layer in the bits that its divergence is worth.

Layers differ by more than a bit does: in SmolLM2-135M six of thirty layers make 73% of what caches of two bits lose
(docs/caches.md). So keys alone, and values alone, of each layer are stored as int2, and the model is run; what other
codes lose follows from the mean square e by which they round normal numbers, as divergence is quadratic in a small
error:

    KL(int b) = KL(int2) (e(int b) / e(int2))^p,      p = 1

Small divergences add up, so an integer program picks the storages (KVTuner, Li et al. 2025, arXiv:2502.04420, searches
pairs of keys and values by layer, too). Coarse codes lose more than that where others are coarse too, so the program is
also solved for powers p above 1, and the model as a whole says which of the answers loses least, on a longer text: the
more tokens are read from codes, the more the coarsest count.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from pydantic import BaseModel, ConfigDict

from graphopt.analysis.structure.paged_caches import layers_of
from graphopt.artifact.tokens import DEFAULT_WINDOW, texts_of, tokenizer_among, windows_of_text
from graphopt.compile.compilation import Compilation
from graphopt.compile.search.jsonl import Lines
from graphopt.compile.search.losses import Sample
from graphopt.compile.search.program import solve
from graphopt.errors import InputError
from graphopt.graph.weights.data_file import save_model
from graphopt.inference.decoding.decoder import Decoder
from graphopt.inference.session import Session
from graphopt.passes.cache.quantize_kv import PAGE, QuantizeKV
from graphopt.passes.recipe import Recipe
from graphopt.quality.figures import Comparison, Floats, log_probabilities
from graphopt.quality.texts import held_out_texts
from graphopt.quantization.statistics.options import CalibrationOptions
from graphopt.runtime_ops.kv_attention.spec.attributes import LEVELS
from graphopt.runtime_ops.kv_attention.spec.layout import round_page
from graphopt.runtime_ops.kv_attention.spec.storages import STORAGE_OF
from graphopt.tasks.causal_lm.interface import Interface
from graphopt.util.progress import Progress, silent

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import onnx_ir as ir

    from graphopt.analysis.structure.paged_caches import PagedLayer
    from graphopt.artifact.artifact import Artifact
    from graphopt.tasks.ports import Array, IntArray

RECIPE = "rotate-kv4"
STORAGES = ("int8", "int6", "int4", "int3", "int2", "int1")
"""What is chosen from by default."""

TEXTS = CalibrationOptions(window=1024, windows=2)
"""What is read for each measurement by default; a window is shorter where the model has fewer positions."""

MEASURED_STORAGE = "int2"
"""What a layer is measured in: fine enough for errors to count by their square, coarse enough to be seen."""

_LONG = 4
"""Windows that answers are judged on, as a multiple of those that layers are measured on."""

_POWERS = (1.0, 1.25, 1.5)
"""Of the share of its loss that a storage is taken to have: what each leads to is judged by the model as a whole."""

_FLOATS = "float32"
_EXACT = "int8"
"""What keys are stored in while values are measured, and values while keys are: it loses next to nothing."""

Pair = tuple[str, str]
"""Storages of keys and of values."""


class LayerLoss(BaseModel):
    """What a layer costs.

    Attributes:
        layer: N in ``past_key_values.N``.
        keys: divergence in nats per token of the model whose keys of this layer alone are int2.
        values: the same for its values.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    layer: int
    keys: float
    values: float


class CacheStorages(BaseModel):
    """What the search ends with.

    Attributes:
        recipe: the recipe, with storages by layer.
        layers: the storages of keys and of values of each layer that the recipe stores as integers; others stay.
        losses: what was measured of each layer.
        bytes: of a token in the caches of all layers, scales included.
        recipe_bytes: the same as the recipe has it.
        loss: divergence of the model with all of them from the one with caches of floats, in nats per token of
            held-out text.
        recipe_loss: the same as the recipe has it.
    """

    model_config = ConfigDict(frozen=True)

    recipe: Recipe
    layers: dict[int, Pair]
    losses: list[LayerLoss]
    bytes: float
    recipe_bytes: float
    loss: float
    recipe_loss: float


def search_caches(
    model: str | Path | Artifact,
    folder: str | Path,
    *,
    recipe: str | Path | Recipe = RECIPE,
    room: float | None = None,
    storages: Sequence[str] = STORAGES,
    texts: CalibrationOptions = TEXTS,
    on_stage: Progress = silent,
) -> CacheStorages:
    """Choose how each layer stores its cache so that the model diverges least and a token takes at most ``room`` bytes.

    Args:
        model: an artifact folder or an ``.onnx`` file of a causal language model, with a tokenizer. It is opened anew
            for each measurement, two of each layer.
        folder: where statistics and measurements are kept. A search that was cut off goes on there.
        recipe: what to do: its step ``quantize_kv`` gets the storages.
        room: bytes of a token in all layers, scales included; ``None`` for what the recipe takes.
        storages: to choose from.
        texts: what to measure on, by default source of the Python standard library, as for calibrations. A window is
            longer than pages of floats; held-out texts are cut alike.
        on_stage: called for each measurement.

    Raises:
        InputError: the model or the recipe cannot be used, there is no such storage, heads do not fit one, or the bytes
            are too few.
        MissingDependencyError: scipy is not installed.
    """
    unknown = [name for name in storages if name not in LEVELS]
    if unknown or not storages:
        raise InputError(
            f"{', '.join(unknown) or 'no storage'} cannot be searched: caches are chosen among integers",
            remedy=f"choose among {', '.join(LEVELS)} with --storage",
        )
    caches = _Caches(model, recipe, Path(folder), texts)
    caches.check_heads(storages)
    coarse_first = sorted(storages, key=LEVELS.__getitem__)
    losses = caches.losses(on_stage)
    pairs: list[Pair] = [(keys, values) for keys in coarse_first for values in coarse_first]
    sizes = [[caches.token_bytes(row.layer, pair) for pair in pairs] for row in losses]
    shares = {storage: caches.share_of_loss(storage) for storage in coarse_first}
    recipe_bytes = caches.recipe_bytes
    candidates: list[dict[int, Pair]] = []
    for power in _POWERS:
        costs = [
            [row.keys * shares[keys] ** power + row.values * shares[values] ** power for keys, values in pairs]
            for row in losses
        ]
        numbers = solve(costs, sizes, recipe_bytes if room is None else room)
        answer = {row.layer: pairs[number] for row, number in zip(losses, numbers, strict=True)}
        if answer not in candidates:
            candidates.append(answer)
    layers = caches.best(candidates, on_stage)
    new_recipe = caches.recipe.setting("quantize_kv", layers={**caches.other_layers, **layers})
    total = sum(caches.token_bytes(number, pair) for number, pair in layers.items())
    names = [" and ".join(pair) for pair in layers.values()]
    counts = ", ".join(f"{names.count(name)} as {name}" for name in sorted(set(names)))
    description = (
        f"for one model, {total:,.0f} bytes of a token: caches of layers {counts}; made by graphopt search-cache"
    )
    return CacheStorages(
        recipe=new_recipe.model_copy(update={"name": f"{new_recipe.name}-searched", "description": description}),
        layers=layers,
        losses=losses,
        bytes=total,
        recipe_bytes=recipe_bytes,
        loss=caches.held_out_loss(layers, on_stage),
        recipe_loss=caches.held_out_loss(None, on_stage),
    )


class _Caches:
    """A model whose caches are stored in one way after the other.

    Args:
        model: the model.
        recipe: its recipe, with a step ``quantize_kv`` of integers.
        folder: for statistics and measurements.
        texts: what to measure on.

    Attributes:
        recipe: the recipe.
        other_layers: what the recipe says of layers that are not searched, such as those that it leaves in floats.
        recipe_bytes: of a token in all layers that are searched, as the recipe stores them.
    """

    def __init__(
        self, model: str | Path | Artifact, recipe: str | Path | Recipe, folder: Path, texts: CalibrationOptions
    ) -> None:
        self._compilation = compilation = Compilation(model, recipe, work=folder, statistics=folder)
        step = next((step for step in compilation.passes if isinstance(step, QuantizeKV)), None)
        if step is None or step.storage not in LEVELS:
            raise InputError(
                f"the recipe {compilation.recipe.name} has no step quantize_kv with a storage of integers",
                remedy=f"take {RECIPE}, or --add quantize_kv",
            )
        self._step, self.recipe = step, compilation.recipe_for_target
        compilation.check_weights()
        compilation.apply_unchecked(compilation.passes[: compilation.passes.index(step)])
        compilation.settle()
        source, positions = compilation.source, compilation.source.manifest.model.max_positions
        window = min(texts.window or positions or DEFAULT_WINDOW, positions or DEFAULT_WINDOW)
        long = min(_LONG * window, positions or _LONG * window)
        texts = texts.model_copy(update={"window": window})
        tokenizer = tokenizer_among(source.companions)
        self._samples: dict[Sample, list[IntArray]] = {
            "all": texts_of(source.companions, texts, positions),
            "long": texts_of(source.companions, texts.model_copy(update={"window": long, "windows": 1}), positions),
            "held out": [
                ids for text in held_out_texts() for ids in windows_of_text(tokenizer, text, window, texts.windows)
            ],
        }
        self._first, self._page = step.context_tokens, step.page or PAGE
        longest = min(max(map(len, sample)) for sample in self._samples.values())
        if longest <= self._first + 1:
            raise InputError(
                f"a window has {longest} tokens, and the first {self._first} of them read pages of floats",
                remedy="give a longer window, a longer text, or a smaller page of quantize_kv",
            )
        layers = layers_of(self._model({}).graph)
        self._layers = {layer.number: layer for layer in layers if layer.attributes.levels is not None}
        if not self._layers:
            raise InputError(
                "no layer of the model stores its cache as integers",
                remedy="`graphopt optimize` with the same recipe says why",
            )
        self.other_layers = {number: storage for number, storage in step.layers.items() if number not in self._layers}
        self.recipe_bytes = sum(_token_bytes(layer) for layer in self._layers.values())
        key = hashlib.sha256(f"{compilation.origin} {self.recipe.to_yaml()}".encode())
        for ids in self._samples["all"]:
            key.update(ids.tobytes())
        self._folder, self._key, self._references = folder, key.hexdigest()[:16], dict[Sample, list[Floats]]()

    def check_heads(self, storages: Sequence[str]) -> None:
        """Refuse storages that cannot pack the heads of a layer: it would stay in floats."""
        for number, layer in self._layers.items():
            fitting = [name for name in storages if layer.head_size % STORAGE_OF[name].unit == 0]
            if len(fitting) < len(storages):
                names = [name for name in storages if name not in fitting]
                raise InputError(
                    f"heads of {layer.head_size} numbers cannot be stored as {' or '.join(names)}, which pack "
                    f"{STORAGE_OF[names[0]].unit} at a time",
                    node=f"layer {number}",
                    remedy=f"choose among {', '.join(fitting)} with --storage",
                )

    def token_bytes(self, number: int, pair: Pair) -> float:
        """Return the bytes of a token of a layer, scales included."""
        layer = self._layers[number]
        return _token_bytes(replace(layer, attributes=self._step.attributes(layer, *pair)))

    def share_of_loss(self, storage: str) -> float:
        """Return what a storage loses of what int2 does, by the mean square error of normal numbers."""
        return self._mean_square(storage) / self._mean_square(MEASURED_STORAGE)

    def _mean_square(self, storage: str) -> float:
        numbers = np.random.default_rng(0).standard_normal((1024, self._page), np.float32)
        codes, low, step = round_page(numbers, -1, LEVELS[storage], self._step.share_of_codes(storage))
        errors = low[:, np.newaxis] + step[:, np.newaxis] * codes.astype(np.float32) - numbers
        return float(np.square(errors).mean())

    def losses(self, on_stage: Progress) -> list[LayerLoss]:
        """Return what keys alone and values alone of each layer cost as int2."""
        measurements = Lines(self._folder / f"caches-{self._key}.jsonl", LayerLoss, lambda row: str(row.layer))
        for count, number in enumerate(self._layers):
            if str(number) not in measurements.rows:
                on_stage("layers, one at a time", count, len(self._layers))
                keys, values = (
                    self._divergence({number: pair}, "all")
                    for pair in ((MEASURED_STORAGE, _EXACT), (_EXACT, MEASURED_STORAGE))
                )
                measurements.add(LayerLoss(layer=number, keys=keys, values=values))
        return [measurements.rows[str(number)] for number in self._layers]

    def best(self, candidates: Sequence[dict[int, Pair]], on_stage: Progress) -> dict[int, Pair]:
        """Return the storages of layers with which the model as a whole loses least on a long window."""
        if len(candidates) == 1:
            return candidates[0]
        divergences = []
        for count, layers in enumerate(candidates):
            on_stage("answers of the program", count, len(candidates))
            divergences.append(self._divergence(layers, "long"))
        return candidates[int(np.argmin(divergences))]

    def held_out_loss(self, layers: Mapping[int, Pair] | None, on_stage: Progress) -> float:
        """Return the divergence on held-out text of the model with these storages; ``None``: as the recipe has it."""
        on_stage("held-out text")
        return self._divergence(layers, "held out")

    def _divergence(self, layers: Mapping[int, Pair] | None, sample: Sample) -> float:
        """Return the mean divergence from caches of floats in nats per token; layers that are not named have these."""
        texts = self._samples[sample]
        if sample not in self._references:
            logits = self._logits(dict.fromkeys(self._layers, _FLOATS), texts)
            self._references[sample] = [log_probabilities(rows) for rows in logits]
        if layers is None:
            storages: dict[int, str | Pair] = {}
        else:
            storages = {number: layers.get(number, _FLOATS) for number in self._layers}
        comparison = Comparison()
        for rows, new_rows, ids in zip(self._references[sample], self._logits(storages, texts), texts, strict=True):
            comparison.add(rows, new_rows, ids[self._first + 1 :])
        return float(comparison.columns()[2].mean())

    def _logits(self, storages: Mapping[int, str | Pair], texts: Sequence[IntArray]) -> Iterator[Array]:
        """Yield logits of each text behind the tokens that pages of floats hold, [tokens, vocabulary].

        A text is read page by page, so that a token reads those right before it in floats, as it would be generated.
        """
        model, manifest = self._model(storages), self._compilation.source.manifest
        with self._compilation.run_folder() as folder:
            file = folder / "model.onnx"
            save_model(model, file, "model.data", in_place=True)
            inference = self._compilation.context.runner.open(file, in_place=True)
            session = Session(file, inference, Interface.of_session(inference), manifest, None)
            for ids in texts:
                decoder, rows = Decoder(session, 1, room=len(ids)), []
                for begin in range(0, len(ids) - 1, self._page):
                    logits = decoder.step(ids[None, begin : min(begin + self._page, len(ids) - 1)])
                    rows.append(np.array(logits[0], np.float32))
                yield np.concatenate(rows)[self._first :]

    def _model(self, storages: Mapping[int, str | Pair]) -> ir.Model:
        """Return the model with caches stored so; layers that are not named are as the recipe has them."""
        step = self._step.model_copy(update={"layers": {**self._step.layers, **storages}})
        return self._compilation.copy_after(step)


def _token_bytes(layer: PagedLayer) -> float:
    return (layer.bytes(1, 2) - layer.bytes(1, 1)) / layer.attributes.page
