"""Presets that make the same nodes, told by their steps: one of them stands for all."""

from __future__ import annotations

import functools
from typing import Any

from graphopt.passes.base import Pass
from graphopt.passes.cache.quantize_kv import QuantizeKV
from graphopt.passes.codes.quantize_weights import QuantizeWeights
from graphopt.passes.recipe import Recipe, load_recipe, presets
from graphopt.runtime_ops.kv_attention.spec.attributes import LEVELS

STANDARD = ("int4", "uint4", "int8", "uint8")


def nearest(recipe: Recipe) -> Recipe:
    """Return a recipe with codes rounded to nearest, which takes no run of the model and makes the same nodes."""
    if any(isinstance(step, QuantizeKV) for step in recipe.steps):
        recipe = recipe.setting("quantize_kv", key_feedback=False, key_whitening=False)
    if any(isinstance(step, QuantizeWeights) for step in recipe.steps):
        return recipe.setting("quantize_weights", rounding="nearest")
    return recipe


@functools.cache
def distinct() -> dict[str, Recipe]:
    """Return the presets with codes rounded to nearest; of those that make the same nodes then, one.

    How codes are chosen changes neither a node nor its record, which a test of `tests/report/test_presets.py` holds.
    Nor does a format, but that some are onnxruntime's own.
    """
    recipes: dict[str, Recipe] = {}
    shapes = []
    for name in presets():
        recipe = nearest(load_recipe(name))
        step_shapes = [_shape(step) for step in recipe.steps]
        if step_shapes not in shapes:
            shapes.append(step_shapes)
            recipes[name] = recipe
    return recipes


def _shape(step: Pass) -> dict[str, Any]:
    """Return the options of a step with each format as whether onnxruntime has a product for it.

    Caches of codes have the same ports, whatever their bits.
    """
    options = step.model_dump()
    if isinstance(step, QuantizeKV) and step.storage in LEVELS:
        options = {**options, "storage": "codes", "value_storage": None}
    options.pop("roles", None)
    for role in ("linear", "lm_head"):
        if options.get(role):
            options[role] = options[role]["format"] in STANDARD
    return options
