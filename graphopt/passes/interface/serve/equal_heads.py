"""Layers whose heads differ in number or size: an engine gives all layers blocks of one shape."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from graphopt.graph.diagnostics import Rule

if TYPE_CHECKING:
    from collections.abc import Mapping

    import onnx_ir as ir

    from graphopt.analysis.structure.paged_caches import PagedLayer
    from graphopt.runtime_ops.kv_attention.spec.attributes import KVAttributes

WIDER_BLOCKS = Rule(
    "serve.widened",
    "its {heads} KV heads of {size} numbers are stored as {most_heads} of {most}, which the widest layer has: an "
    "engine gives all layers blocks of one shape",
)


def equal_layers(layers: Mapping[ir.Node, PagedLayer]) -> dict[ir.Node, PagedLayer]:
    """Return the layers with as many KV heads, of as many numbers, as the widest of them.

    Latents get zeros behind their rows. Heads with policies of their own are counted, and a latent has one head, of
    which values are a part: graphs with the former, or with both latents and heads, stay as they are.
    """
    are_latents = {bool(layer.attributes.value_size) for layer in layers.values()}
    if len(are_latents) > 1 or any(len(layer.attributes.policies) > 1 for layer in layers.values()):
        return dict(layers)
    heads = max((layer.attributes.kv_heads for layer in layers.values()), default=0)
    size = max((layer.head_size for layer in layers.values()), default=0)
    return {
        node: replace(
            layer,
            head_size=size,
            attributes=replace(layer.attributes, kv_heads=heads, slopes=_slopes(layer.attributes, heads)),
        )
        for node, layer in layers.items()
    }


def _slopes(attributes: KVAttributes, heads: int) -> tuple[float, ...]:
    """Return the slopes of a layer that gets so many KV heads, whose new ones are zeros."""
    group = len(attributes.slopes) // attributes.kv_heads
    return (*attributes.slopes, *[0.0] * (group * (heads - attributes.kv_heads)))
