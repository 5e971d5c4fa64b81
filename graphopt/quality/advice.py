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


def advice(found: Losses, recipe: Recipe) -> Iterator[Fact]:
    """Yield what the figures support, the most first."""
    total = found.kl
    if total:
        by = {each.what: each for each in found.groups}
        if "inputs" in by and total - by["inputs"].kl >= SHARE * total:
            yield INPUTS(kl=by["inputs"].kl, of=total)
        for each in worth(found):
            yield _comeback(each, total, recipe)
        if "products" in by and by["products"].kl >= SHARE * total:
            yield REST(kl=by["products"].kl, of=total)
        if found.remainder is not None and found.remainder.together >= SHARE * total:
            yield TOGETHER(kl=found.remainder.together, of=total)
    yield from _odd(found.products)


def worth(found: Losses) -> list[Group]:
    """Return groups that bring a tenth of the divergence back in floats, those worth most a byte first.

    Of layers only the smallest groups are listed.
    """
    total = found.kl or 0.0
    large = [each for each in found.groups if total - each.kl >= SHARE * total > 0]
    layers = [each for each in large if each.what == "layers"]
    narrow = [each for each in layers if not any(set(one.layers) < set(each.layers) for one in layers)]
    listed = [*(each for each in large if each.what in ("role", "both")), *narrow]
    return sorted(listed, key=lambda one: (total - one.kl) / max(1, one.bytes), reverse=True)


def sparing(recipe: Recipe, matrices: Sequence[str]) -> Recipe:
    """Return ``recipe`` with ``matrices`` left in floats."""
    there = next(step.matrices for step in recipe.steps if isinstance(step, QuantizeWeights))
    return recipe.setting("quantize_weights", matrices={**there, **dict.fromkeys(matrices)})


def quantizes(recipe: Recipe) -> bool:
    """Return whether a recipe has the step ``quantize_weights``."""
    return any(step.name == "quantize_weights" for step in recipe.steps)


def _comeback(each: Group, total: float, recipe: Recipe) -> Fact:
    gain = total - each.kl
    figures = {"gain": gain, "of": total, "share": gain / total, "megabytes": each.bytes / 1e6}
    if each.what == "layers" and len(each.layers) == 1:
        return LAYER(layer=each.layers[0], **figures)
    if each.what == "layers":
        return LAYERS(layers=list(each.layers), **figures)
    if each.what == "both":
        return BOTH(role=each.role, layer=each.layers[0], **figures)
    option = "quantize_weights.lm_head=null" if each.role == "lm_head" and quantizes(recipe) else None
    return ROLE(role=each.role, option=option, **figures)


def _odd(products: Sequence[ProductLoss]) -> Iterator[Fact]:
    """Yield products that err more by themselves than others of their role, the worst of each role."""
    for role in dict.fromkeys(each.role for each in products):
        those = [each for each in products if each.role == role]
        worst, usual = max(those, key=lambda one: one.local), float(np.median([each.local for each in those]))
        if worst.local > _ODD * usual > 0:
            yield WORST(name=worst.node, local=worst.local, usual=usual, role=role)
