"""What figures of losses support: which products to keep in floats, the most for its bytes first, and what else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from graphopt.graph.diagnostics import Fact, Rule
from graphopt.passes.codes.quantize_weights import QuantizeWeights
from graphopt.quality.groups import SHARE, Group

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from graphopt.passes.recipe import Recipe
    from graphopt.quality.losses import Losses, ProductLoss

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
BOTH = Rule(
    "losses.both",
    "{role} of layer {layer} in floats takes back {share:.0%} of the divergence ({gain:.4f} of {of:.4f} nats) for "
    "{megabytes:.2f} MB more",
)
WORST = Rule(
    "losses.worst", "{name} errs most by itself: {local:.1%} of what it makes, against {usual:.1%} for most {role}"
)
REST = Rule("losses.rest", "{kl:.4f} of {of:.4f} nats stay with all products in floats: embedding, caches, other steps")
TOGETHER = Rule(
    "losses.together",
    "{kl:.4f} of {of:.4f} nats belong to no kind of product alone: errors of several kinds strengthen each other",
)

_ODD = 1.5


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
            yield REST(kl=by_kind["products"].kl, of=total)
        if losses.remainder is not None and losses.remainder.together >= SHARE * total:
            yield TOGETHER(kl=losses.remainder.together, of=total)
    yield from _odd(losses.products)


def worth(losses: Losses) -> list[Group]:
    """Return groups that bring a tenth of the divergence back in floats, those worth most a byte first.

    Of layers only the smallest groups are listed.
    """
    total = losses.kl or 0.0
    large = [group for group in losses.groups if total - group.kl >= SHARE * total > 0]
    layers = [group for group in large if group.what == "layers"]
    narrow = [group for group in layers if not any(set(other_.layers) < set(group.layers) for other_ in layers)]
    candidates = [*(group for group in large if group.what in ("role", "both")), *narrow]
    return sorted(candidates, key=lambda one: (total - one.kl) / max(1, one.bytes), reverse=True)


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
        return BOTH(role=group.role, layer=group.layers[0], **figures)
    option = "quantize_weights.lm_head=null" if group.role == "lm_head" and quantizes(recipe) else None
    return ROLE(role=group.role, option=option, **figures)


def _odd(products: Sequence[ProductLoss]) -> Iterator[Fact]:
    """Yield products that err more by themselves than others of their role, the worst of each role."""
    for role in dict.fromkeys(product.role for product in products):
        peers = [product for product in products if product.role == role]
        worst, median = max(peers, key=lambda one: one.local), float(np.median([product.local for product in peers]))
        if worst.local > _ODD * median > 0:
            yield WORST(name=worst.node, local=worst.local, usual=median, role=role)
