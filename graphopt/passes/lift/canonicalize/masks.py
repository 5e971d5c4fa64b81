"""Masks by meaning: arithmetic that means "causal and not padding", however it is written, becomes ``is_causal``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.graph.diagnostics import Fact, Rule
from graphopt.passes.common.masks import MaskEvaluator, drop_guard
from graphopt.passes.common.nodes import attentions
from graphopt.passes.lift.canonicalize.padding import padding_mask

if TYPE_CHECKING:
    from graphopt.passes.context import Context

_MASK, _PAST_KEY = 3, 4

MASK_CAUSAL = Rule("canonicalize.mask-causal", "mask arithmetic ({meaning}) became is_causal")
MASK_UNDERSTOOD = Rule("canonicalize.mask-understood", "mask arithmetic became what it means ({meaning})")
MASK_STAYS = Rule("canonicalize.mask-stays", "its mask {mask} stays as it is: {why}")
CACHE_OUTSIDE = Rule(
    "mask.cache-outside",
    "keys are appended to the cache outside of Attention, where is_causal would count queries from the first key",
)


def lift_masks(model: ir.Model, context: Context) -> None:
    """Replace masks that mean one of :data:`_MEANINGS`, and the guards around ``Attention``."""
    evaluator, ledger = MaskEvaluator(model, context), context.ledger
    for node in attentions(model):
        mask = node.inputs[_MASK] if len(node.inputs) > _MASK else None
        if mask is None or node.attributes.get_int("is_causal") == 1:
            continue
        meaning = evaluator.meaning(mask)
        if isinstance(meaning, Fact):
            ledger.skipped(node, MASK_STAYS(mask=mask.name, why=meaning))
            continue
        if "causal" in meaning and not _counts_from_the_cache(node):
            ledger.skipped(node, MASK_STAYS(mask=mask.name, why=CACHE_OUTSIDE()))
            continue
        drop_guard(evaluator, node, mask, ledger)
        node.replace_input_with(_MASK, padding_mask(model) if "padding" in meaning else None)
        if "causal" in meaning:
            node.attributes["is_causal"] = ir.AttrInt64("is_causal", 1)
            ledger.changed(node, MASK_CAUSAL(meaning=meaning), [mask])
        else:
            ledger.changed(node, MASK_UNDERSTOOD(meaning=meaning), [mask])


def _counts_from_the_cache(node: ir.Node) -> bool:
    """Return whether ``is_causal`` of a node hides what follows each query: it reads a cache itself, or there is none.

    Without ``past_key`` query i sees the keys 0 to i, which is right only where there are as many keys as queries.
    """
    if len(node.inputs) > _PAST_KEY and node.inputs[_PAST_KEY] is not None:
        return True
    query, key = (node.inputs[index] for index in (0, 1))
    if query is None or key is None or query.shape is None or key.shape is None:
        return False
    return query.shape[-2] == key.shape[-2] and query.shape[-2] is not None
