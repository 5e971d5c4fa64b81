"""Where quality was lost, and what to do about it: errors of each product, and what groups of them do to the whole.

What no group explains is said, too: token embedding, caches, activations, and errors that do not add up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from pydantic import BaseModel, ConfigDict

from graphopt.graph.diagnostics import Fact, Rule
from graphopt.passes.codes.quantize_weights import QuantizeWeights
from graphopt.passes.recipe import Recipe
from graphopt.quality.groups import SHARE, Group, Measuring, Remainder, remainder_of
from graphopt.quality.levels import Histogram, histogram
from graphopt.quality.product_sessions import sessions
from graphopt.quality.spread import Spread
from graphopt.tasks import TASKS
from graphopt.util.progress import Progress, silent

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import onnx_ir as ir

    from graphopt.quality.products import Pair
    from graphopt.tasks.ports import IntArray


INPUTS = Rule(
    "losses.inputs",
    "with inputs of products in floats the divergence is {kl:.4f} nats instead of {of:.4f}: write `activations: "
    "float32` into the recipe, at the cost of speed",
)
ROLE = Rule(
    "losses.role",
    "{role} in floats takes back {share:.0%} of the divergence ({gain:.4f} of {of:.4f} nats) for {megabytes:.2f} MB "
    "more",
    option="; `--set {option}`",
)
LAYERS = Rule(
    "losses.layers",
    "layers {layers} in floats take back {share:.0%} of the divergence ({gain:.4f} of {of:.4f} nats) for "
    "{megabytes:.2f} MB more",
)
LAYER = Rule(
    "losses.layer",
    "layer {layer} in floats takes back {share:.0%} of the divergence ({gain:.4f} of {of:.4f} nats) for "
    "{megabytes:.2f} MB more",
)
ROLE_OF_LAYER = Rule(
    "losses.both",
    "{role} of layer {layer} in floats takes back {share:.0%} of the divergence ({gain:.4f} of {of:.4f} nats) for "
    "{megabytes:.2f} MB more",
)
WORST = Rule(
    "losses.worst", "{name} errs most by itself: {local:.1%} of what it makes, against {usual:.1%} for most {role}"
)
OUTSIDE_PRODUCTS = Rule(
    "losses.rest", "{kl:.4f} of {of:.4f} nats stay with all products in floats: embedding, caches, other steps"
)
INTERACTION = Rule(
    "losses.together",
    "{kl:.4f} of {of:.4f} nats belong to no kind of product alone: errors of several kinds strengthen each other",
)

_ODD = 1.5


class ProductLoss(BaseModel):
    """How far one product is off, relative to what it makes in floats (root of the mean squares).

    Attributes:
        node: its name.
        role: what it is for.
        layer: where.
        local: with inputs of the reference.
        accumulated: inside the model; ``None`` for an expert that was given other tokens there.
        first_token: the same for the first token of each window, which is not counted in the others: it is often huge.
        bytes: of its weights.
        read_before: how far its inputs spread in BEFORE; ``None`` where it is not there under this name.
        read: the same in the reference, where the recipe's rotations have been at them.
    """

    model_config = ConfigDict(extra="forbid")

    node: str
    role: str
    layer: int | None
    local: float
    accumulated: float | None
    first_token: float | None
    bytes: int
    read_before: Spread | None = None
    read: Spread | None = None


class Losses(BaseModel):
    """Where quality was lost.

    Attributes:
        tokens: how many were read.
        kl: divergence of the model from its reference, in nats per token; ``None`` for one that makes no text.
        products: in the order of the graph.
        groups: what groups of them do to the divergence.
        remainder: what of the divergence no single group explains.
        unmatched: products without a partner in the reference.
        advice: what the figures support, the most first.
        remedy: the group that is worth the most for its bytes in floats, where a tenth of the divergence comes back.
        recipe: the recipe of the model with that in floats; ``None`` where no step ``quantize_weights`` rounds it.
        histograms: of the product of each role that errs most by itself, where they were asked for.
    """

    model_config = ConfigDict(extra="forbid")

    tokens: int
    kl: float | None = None
    products: list[ProductLoss] = []
    groups: list[Group] = []
    remainder: Remainder | None = None
    unmatched: list[str] = []
    advice: list[Fact] = []
    remedy: Group | None = None
    recipe: Recipe | None = None
    histograms: list[Histogram] = []


def losses_of(
    pair: Pair, texts: Sequence[IntArray], *, restore: bool = True, weights: bool = False, on_stage: Progress = silent
) -> Losses:
    """Measure where a compressed model loses quality.

    Args:
        pair: the model and its reference.
        texts: what both read, int64 [length] each.
        restore: whether to run both models with groups of products swapped as well: once for each role, and for groups
            of layers.
        weights: whether to count how weights lie among the levels of their formats.
        on_stage: called when a stage begins.

    Raises:
        InputError: a model cannot be run.
    """
    losses = Losses(tokens=sum(map(len, texts)), unmatched=pair.names_without_partner)
    for number, product in enumerate(product_losses(pair, texts)):
        on_stage("errors of products", number, len(pair.products))
        losses.products.append(product)
    if restore and TASKS[pair.after.manifest.task].generates and not _last_only(pair.after.model):
        with sessions(pair.folder) as open_model:
            measuring = Measuring(pair, texts, open_model, on_stage)
            losses.kl, losses.groups = measuring.total, list(measuring.groups())
        losses.remainder = remainder_of(losses.kl, losses.groups)
    losses.advice = list(advice(losses, pair.recipe))
    losses.remedy = next(iter(worth(losses)), None)
    if losses.remedy is not None and losses.remedy.matrices and quantizes(pair.recipe):
        losses.recipe = sparing(pair.recipe, losses.remedy.matrices)
    if weights:
        losses.histograms = list(_histograms(pair, losses.products))
    return losses


def product_losses(pair: Pair, texts: Sequence[IntArray]) -> Iterator[ProductLoss]:
    """Yield the errors of each product of a model beside its reference, on some texts, int64 [length] each."""
    for product, errors in pair.errors(texts):
        yield ProductLoss(node=product.name, role=product.role, layer=product.layer, bytes=product.bytes, **errors)


def _histograms(pair: Pair, errors: Sequence[ProductLoss]) -> Iterator[Histogram]:
    """Yield the histogram of the product of each role that errs most by itself."""
    nodes = {node.name: node for node in pair.after.model.graph}
    products = {product.name: product for product in pair.products}
    for role in dict.fromkeys(loss.role for loss in errors):
        worst = max((loss for loss in errors if loss.role == role), key=lambda loss: loss.local)
        counts = histogram(products[worst.node], nodes[worst.node])
        if counts is not None:
            yield counts


def _last_only(model: ir.Model) -> bool:
    logits = next((value for value in model.graph.outputs if value.name == "logits"), None)
    return logits is None or (logits.shape is not None and len(logits.shape) > 1 and logits.shape[1] == 1)


def advice(losses: Losses, recipe: Recipe) -> Iterator[Fact]:
    """Yield what the figures support, the most first."""
    total = losses.kl
    if total:
        by_kind = {group.what: group for group in losses.groups}
        if "inputs" in by_kind and total - by_kind["inputs"].kl >= SHARE * total:
            yield INPUTS(kl=by_kind["inputs"].kl, of=total)
        for group in worth(losses):
            yield _comeback(group, total, recipe)
        if "products" in by_kind and by_kind["products"].kl >= SHARE * total:
            yield OUTSIDE_PRODUCTS(kl=by_kind["products"].kl, of=total)
        if losses.remainder is not None and losses.remainder.together >= SHARE * total:
            yield INTERACTION(kl=losses.remainder.together, of=total)
    yield from _odd(losses.products)


def worth(losses: Losses) -> list[Group]:
    """Return groups that bring a tenth of the divergence back in floats, those worth most a byte first.

    Of layers only the smallest groups are listed.
    """
    total = losses.kl or 0.0
    large = [group for group in losses.groups if total - group.kl >= SHARE * total > 0]
    layers = [group for group in large if group.what == "layers"]
    narrow = [group for group in layers if not any(set(smaller.layers) < set(group.layers) for smaller in layers)]
    candidates = [*(group for group in large if group.what in ("role", "both")), *narrow]
    return sorted(candidates, key=lambda group: (total - group.kl) / max(1, group.bytes), reverse=True)


def sparing(recipe: Recipe, matrices: Sequence[str]) -> Recipe:
    """Return ``recipe`` with ``matrices`` left in floats."""
    matrices_now = next(step.matrices for step in recipe.steps if isinstance(step, QuantizeWeights))
    return recipe.setting("quantize_weights", matrices={**matrices_now, **dict.fromkeys(matrices)})


def quantizes(recipe: Recipe) -> bool:
    """Return whether a recipe has the step ``quantize_weights``."""
    return any(step.name == "quantize_weights" for step in recipe.steps)


def _comeback(group: Group, total: float, recipe: Recipe) -> Fact:
    gain = total - group.kl
    figures = {"gain": gain, "of": total, "share": gain / total, "megabytes": group.bytes / 1e6}
    if group.what == "layers" and len(group.layers) == 1:
        return LAYER(layer=group.layers[0], **figures)
    if group.what == "layers":
        return LAYERS(layers=list(group.layers), **figures)
    if group.what == "both":
        return ROLE_OF_LAYER(role=group.role, layer=group.layers[0], **figures)
    option = "quantize_weights.lm_head=null" if group.role == "lm_head" and quantizes(recipe) else None
    return ROLE(role=group.role, option=option, **figures)


def _odd(products: Sequence[ProductLoss]) -> Iterator[Fact]:
    """Yield products that err more by themselves than others of their role, the worst of each role."""
    for role in dict.fromkeys(product.role for product in products):
        peers = [product for product in products if product.role == role]
        worst, median = (
            max(peers, key=lambda product: product.local),
            float(np.median([product.local for product in peers])),
        )
        if worst.local > _ODD * median > 0:
            yield WORST(name=worst.node, local=worst.local, usual=median, role=role)
