"""Where quality was lost, and what to do about it: errors of each product, and what it brings to restore some of them.

Layers are halved: a group of layers is looked into only where restoring it takes back a tenth of the divergence. What
all of them together do not explain is said, too: token embedding, caches, activations, and effects that do not add up.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from pydantic import BaseModel, ConfigDict

from graphopt.errors import InputError
from graphopt.facts import Fact, Rule
from graphopt.passes.codes.quantize_weights import QuantizeWeightsOptions
from graphopt.progress import Progress, silent
from graphopt.quality.figures import Comparison, Floats, log_probabilities
from graphopt.quality.parts import sessions
from graphopt.quality.products import Pair, Product
from graphopt.quality.texts import held_out_texts
from graphopt.recipe import Recipe
from graphopt.runtime import ACCURACY_LEVEL, run
from graphopt.tasks.ports import IntArray
from graphopt.tokens import tokenizer_among, windows_of_text
from graphopt.weights import weight_of

TOKENS, WINDOW = 1024, 256
"""Tokens that errors are taken on, and tokens that are seen at once, by default."""

INPUTS = Rule(
    "losses.inputs",
    "with inputs of products in floats the divergence is {kl:.4f} nats instead of {of:.4f}: write `activations: "
    "float32` into the recipe, at the cost of speed",
)
ROLE = Rule(
    "losses.role",
    "{role} in floats: {gain:.4f} of {of:.4f} nats less for {megabytes:.2f} MB more",
    option="; `--set {option}`",
)
LAYERS = Rule(
    "losses.layers",
    "layers {layers} in floats: {gain:.4f} of {of:.4f} nats less ({share:.0%}) for {megabytes:.2f} MB more",
)
WORST = Rule(
    "losses.worst", "{name} errs most by itself: {local:.1%} of what it makes, against {usual:.1%} for most {role}"
)
REST = Rule("losses.rest", "{kl:.4f} of {of:.4f} nats stay with all products in floats: embedding, caches, other steps")

_SHARE, _ODD = 0.1, 1.5


class ProductLoss(BaseModel):
    """How far one product is off, relative to what it makes in floats (root of the mean squares).

    Attributes:
        node: its name.
        role: what it is for.
        layer: where.
        local: with inputs of the reference.
        accumulated: inside the model.
        first_token: the same for the first token of each window, which is not counted in the others: it is often huge.
        bytes: of its weights.
    """

    model_config = ConfigDict(extra="forbid")

    node: str
    role: str
    layer: int | None
    local: float
    accumulated: float
    first_token: float
    bytes: int


class Restored(BaseModel):
    """What comes back when some products are computed in floats.

    Attributes:
        what: ``role``, ``layers``, ``products`` for all, or ``inputs`` where only their inputs are in floats.
        role: which role.
        layers: which layers.
        kl: divergence from the reference afterwards, in nats per token.
        bytes: that this costs.
        matrices: their weights, by the names that the step ``quantize_weights`` knows.
    """

    model_config = ConfigDict(extra="forbid")

    what: str
    role: str | None = None
    layers: list[int] = []
    kl: float
    bytes: int
    matrices: list[str] = []


class Losses(BaseModel):
    """Where quality was lost.

    Attributes:
        tokens: how many were read.
        kl: divergence of the model from its reference, in nats per token; ``None`` for one that makes no text.
        products: in the order of the graph.
        restored: what restoring some of them brings.
        unmatched: products without a partner in the reference.
        advice: what the figures support, the most first.
        remedy: the role or layers that are worth the most for their bytes in floats, where a tenth of the divergence
            comes back.
        recipe: the recipe of the model with that in floats; ``None`` where no step ``quantize_weights`` rounds it.
    """

    model_config = ConfigDict(extra="forbid")

    tokens: int
    kl: float | None = None
    products: list[ProductLoss] = []
    restored: list[Restored] = []
    unmatched: list[str] = []
    advice: list[Fact] = []
    remedy: Restored | None = None
    recipe: Recipe | None = None


def losses(
    before: Path,
    after: Path,
    texts: Sequence[str] | None = None,
    *,
    tokens: int = TOKENS,
    window: int = WINDOW,
    restore: bool = True,
    on_stage: Progress = silent,
) -> Losses:
    """Measure where a compressed model loses quality.

    Args:
        before: what it was made from.
        after: an artifact of ``graphopt optimize``.
        texts: what both read; :func:`graphopt.quality.texts.held_out_texts` by default.
        tokens: how many of them.
        window: tokens that are seen at once.
        restore: whether to run the model with some products in floats as well: once for each role, and for groups of
            layers.
        on_stage: called when a stage begins.

    Raises:
        InputError: AFTER has no recipe or no tokenizer, or a model cannot be run.
    """
    with tempfile.TemporaryDirectory(prefix="graphopt-") as folder:
        on_stage("running the exact steps of the recipe again")
        pair = Pair(before, after, Path(folder))
        return _measured(pair, after, held_out_texts() if texts is None else texts, tokens, window, restore, on_stage)


def _measured(
    pair: Pair, after: Path, texts: Sequence[str], tokens: int, window: int, restore: bool, on_stage: Progress
) -> Losses:
    if not pair.products:
        raise InputError("no product of this model has a partner in floats", file=after)
    read = _windows(pair, texts, tokens, window)
    found = Losses(tokens=sum(map(len, read)), unmatched=pair.unmatched)
    for number, (product, errors) in enumerate(pair.errors(read)):
        on_stage("errors of products", number, len(pair.products))
        found.products.append(
            ProductLoss(node=product.name, role=product.role, layer=product.layer, bytes=product.bytes, **errors)
        )
    if restore and pair.after.manifest.task == "causal_lm" and not _last_only(pair.after.model):
        _Restoring(pair, read, on_stage).into(found)
    found.advice = list(_advice(found, pair.recipe))
    found.remedy = next(iter(_worth(found)), None)
    if found.remedy is not None and found.remedy.matrices and _quantizes(pair.recipe):
        found.recipe = _sparing(pair.recipe, found.remedy.matrices)
    return found


class _Restoring:
    def __init__(self, pair: Pair, texts: Sequence[IntArray], on_stage: Progress) -> None:
        self.pair, self.texts, self.on_stage = pair, texts, on_stage
        self.expected = [log_probabilities(logits) for logits in self._logits(pair.reference, {})]

    def into(self, found: Losses) -> None:
        """Measure, and write it into ``found``."""
        whole = self.pair.after.model
        total = self._kl(whole, self.pair.entries)
        found.kl = total
        exact = {**self.pair.entries, ACCURACY_LEVEL: "0"}
        if any(each.op_type == "DequantizeLinear" for each in whole.graph) and exact != self.pair.entries:
            found.restored.append(Restored(what="inputs", kl=self._kl(whole, exact), bytes=0))
        found.restored.append(self._of("products", self.pair.products))
        for role in dict.fromkeys(each.role for each in self.pair.products):
            found.restored.append(self._of("role", [p for p in self.pair.products if p.role == role], role=role))
        layers = sorted({each.layer for each in self.pair.products if each.layer is not None})
        found.restored += self._halves(layers, total)

    def _halves(self, layers: list[int], total: float) -> Iterator[Restored]:
        if not layers:
            return
        found = self._of("layers", [p for p in self.pair.products if p.layer in layers], layers=layers)
        yield found
        if len(layers) > 1 and total - found.kl >= _SHARE * total:
            middle = len(layers) // 2
            yield from self._halves(layers[:middle], total)
            yield from self._halves(layers[middle:], total)

    def _of(
        self, what: str, products: Sequence[Product], role: str | None = None, layers: Iterable[int] = ()
    ) -> Restored:
        size = sum(each.float_bytes - each.bytes for each in products)
        kl = self._kl(self.pair.restored(products), self.pair.entries)
        weights = [weight_of(node, 1) for each in products for node in each.floats]
        names = [value.name for value in weights if value is not None and value.name]
        return Restored(what=what, role=role, layers=list(layers), kl=kl, bytes=size, matrices=names)

    def _kl(self, model: ir.Model, entries: Mapping[str, str]) -> float:
        self.on_stage("running with some products in floats")
        found = Comparison()
        for ids, expected, logits in zip(self.texts, self.expected, self._logits(model, entries), strict=True):
            found.add(expected[:-1], logits[:-1], ids[1:])
        return float(found.columns()[2].mean())

    def _logits(self, model: ir.Model, entries: Mapping[str, str]) -> list[Floats]:
        with sessions(self.pair.folder) as opened:
            session: Any = opened(model, entries)
            asked = {each.name for each in session.get_inputs()}
            made = []
            for ids in self.texts:
                feeds = self.pair.task.text_feeds(model.graph, ids[None])
                fed = {name: array for name, array in feeds.items() if name in asked}
                made.append(run(session, ["logits"], fed)[0][0].astype(np.float32))
            return made


def _windows(pair: Pair, texts: Sequence[str], tokens: int, window: int) -> list[IntArray]:
    tokenizer = tokenizer_among(pair.after.companions)
    positions = pair.after.manifest.model.max_positions
    window = min(window, positions or window)
    each = max(1, tokens // window // len(texts))
    return [ids for text in texts for ids in windows_of_text(tokenizer, text, window, each)]


def _last_only(model: ir.Model) -> bool:
    logits = next((value for value in model.graph.outputs if value.name == "logits"), None)
    return logits is None or (logits.shape is not None and len(logits.shape) > 1 and logits.shape[1] == 1)


def _advice(found: Losses, recipe: Recipe) -> Iterator[Fact]:
    total = found.kl
    if total:
        by = {each.what: each for each in found.restored}
        if "inputs" in by and total - by["inputs"].kl >= _SHARE * total:
            yield INPUTS(kl=by["inputs"].kl, of=total)
        for each in _worth(found):
            yield _comeback(each, total, recipe)
        if "products" in by and by["products"].kl >= _SHARE * total:
            yield REST(kl=by["products"].kl, of=total)
    yield from _odd(found.products)


def _worth(found: Losses) -> list[Restored]:
    """Return roles and groups of layers that bring a tenth of the divergence back, those worth most a byte first."""
    total = found.kl or 0.0
    large = [each for each in found.restored if total - each.kl >= _SHARE * total > 0]
    roles = [each for each in large if each.what == "role"]
    layers = [each for each in large if each.what == "layers"]
    narrow = [each for each in layers if not any(set(one.layers) < set(each.layers) for one in layers)]
    return sorted([*roles, *narrow], key=lambda one: (total - one.kl) / max(1, one.bytes), reverse=True)


def _sparing(recipe: Recipe, matrices: Sequence[str]) -> Recipe:
    """Return ``recipe`` with ``matrices`` left in floats."""
    there = next(step.matrices for step in recipe.steps if isinstance(step, QuantizeWeightsOptions))
    return recipe.setting("quantize_weights", matrices={**there, **dict.fromkeys(matrices)})


def _comeback(each: Restored, total: float, recipe: Recipe) -> Fact:
    figures = {"gain": total - each.kl, "of": total, "megabytes": each.bytes / 1e6}
    if each.what == "layers":
        return LAYERS(layers=list(each.layers), share=(total - each.kl) / total, **figures)
    option = "quantize_weights.lm_head=null" if each.role == "lm_head" and _quantizes(recipe) else None
    return ROLE(role=each.role, option=option, **figures)


def _quantizes(recipe: Recipe) -> bool:
    return any(step.step == "quantize_weights" for step in recipe.steps)


def _odd(products: Sequence[ProductLoss]) -> Iterator[Fact]:
    """Yield products that err more by themselves than others of their role, the worst of each role."""
    for role in dict.fromkeys(each.role for each in products):
        those = [each for each in products if each.role == role]
        worst, usual = max(those, key=lambda one: one.local), float(np.median([each.local for each in those]))
        if worst.local > _ODD * usual > 0:
            yield WORST(name=worst.node, local=worst.local, usual=usual, role=role)
