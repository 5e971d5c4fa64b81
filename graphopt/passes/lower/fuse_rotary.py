"""Queries, keys and values of one product are cut apart and turned by one node."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from graphopt.graph.diagnostics import Effect, Fact, Rule
from graphopt.graph.editing import inherit, remove, take_place
from graphopt.graph.weights import weight_of
from graphopt.passes.base import Pass
from graphopt.runtime_ops.split_rotary.spec.op import SPLIT_ROTARY
from graphopt.util.targets import Target

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphopt.passes.context import Context, Ledger

ROTARY_FUSED = Rule("fuse_rotary.fused", "splits {input}, and turns queries and keys")
NOT_TURNED = Rule("fuse_rotary.not-turned", "{part} is not read by a rotary embedding of rows of heads alone")
DIFFER = Rule("fuse_rotary.differ", "queries and keys are turned by different angles, or in different pairs")
OTHER_SIZES = Rule("fuse_rotary.other-sizes", "heads of queries, keys and values have different sizes")

_PARTS, _RANK = 3, 3


class FuseRotary(Pass):
    """Split queries, keys and values and turn the first two in one node, where one product makes all three.

    before::

        q, k, v = Split(x, [H D, K D, K D])
        q', k' = RotaryEmbedding(q, cos, sin; num_heads=H), RotaryEmbedding(k, cos, sin; num_heads=K)

    after::

        q', k', v = ai.graphopt::SplitRotary(x, cos, sin; heads=H, kv_heads=K)

    The second is the definition of the first. Of three nodes one is left; onnxruntime turns inside of its own attention
    (``GroupQueryAttention``), which reads no pages. Where a norm or a bias stands between product and rotation, and
    where heads lie behind a transpose, all stay.
    """

    name: ClassVar[str] = "fuse_rotary"
    effect: ClassVar[Effect] = "exact"
    after: ClassVar[tuple[str, ...]] = ("merge_products", "lower")
    targets: ClassVar[tuple[Target, ...]] = ("ort-cuda",)

    def rewrite(self, model: ir.Model, context: Context) -> None:
        """Fuse each such split; say why others stay."""
        splits = [node for node in model.graph if _is_in_three(node)]
        for node in splits:
            reason = _fuse(model.graph, node, context.ledger)
            if reason is not None:
                context.ledger.skipped(node, reason)


def _is_in_three(node: ir.Node) -> bool:
    """Return whether a node splits rows of floats [batch, length, columns] into three parts of known sizes."""
    if node.op_type != "Split" or node.domain or len(node.outputs) != _PARTS:
        return False
    x, sizes = node.inputs[0], weight_of(node, 1)
    if x is None or x.shape is None or len(x.shape) != _RANK or sizes is None or sizes.const_value is None:
        return False
    is_last = node.attributes.get_int("axis", 0) in (-1, _RANK - 1)
    return is_last and x.dtype in SPLIT_ROTARY.schema.inputs[0].types


def _fuse(graph: ir.Graph, split: ir.Node, ledger: Ledger) -> Fact | None:
    """Fuse a split with both rotations behind it, or return why not."""
    queries, keys, values = split.outputs
    rotations = []
    for part in (queries, keys):
        rotation = _rotation(part)
        if rotation is None:
            return NOT_TURNED(part=part.name)
        rotations.append(rotation)
    first, second = rotations
    if _angles(first) != _angles(second):
        return DIFFER()
    heads, kv_heads = (rotation.attributes.get_int("num_heads", 0) for rotation in rotations)
    sizes = weight_of(split, 1)
    assert sizes is not None and sizes.const_value is not None
    widths = sizes.const_value.numpy().tolist()
    size = widths[1] // kv_heads
    rotary = first.attributes.get_int("rotary_embedding_dim", 0) or size
    cos = first.inputs[1]
    if widths != [heads * size, kv_heads * size, kv_heads * size] or rotary > size or rotary % 2:
        return OTHER_SIZES()
    if cos is None or cos.shape is None or len(cos.shape) != _RANK or cos.dtype != queries.dtype:
        return DIFFER()
    attributes = {
        "heads": heads,
        "kv_heads": kv_heads,
        "rotary": rotary,
        "rotary_interleaved": first.attributes.get_int("interleaved", 0),
    }
    new = SPLIT_ROTARY.node([split.inputs[0], *first.inputs[1:3]], attributes, name=f"{split.name}.rotary")
    for output, name in zip(new.outputs, SPLIT_ROTARY.schema.output_names, strict=True):
        output.name = f"{new.name}.{name}"
    # Angles may be computed behind the split, never behind a rotation.
    graph.insert_before(next(node for node in graph if node in rotations), new)
    ledger.changed(new, ROTARY_FUSED(input=split.inputs[0].name if split.inputs[0] else "?"), [split, *rotations])
    inherit(new, split)
    for old, value in zip((first.outputs[0], second.outputs[0], values), new.outputs, strict=True):
        take_place(old, value)
    for node in rotations:
        remove(node)
    if split.graph is not None:
        remove(split)
    graph.sort()  # values may be read before the angles are there
    return None


def _rotation(part: ir.Value) -> ir.Node | None:
    """Return the rotary embedding of rows of heads, with angles for each token, that alone reads ``part``."""
    uses = list(part.uses())
    if len(uses) != 1 or part.is_graph_output() or uses[0].idx:
        return None
    node = uses[0].node
    is_rotary = node.op_type == "RotaryEmbedding" and not node.domain and len(node.inputs) == _RANK
    return node if is_rotary and node.attributes.get_int("num_heads", 0) > 0 else None


def _angles(rotation: ir.Node) -> tuple[object, ...]:
    """Return what two rotations must have in common: their angles, and which numbers of a head are pairs."""
    numbers = (rotation.attributes.get_int(name, 0) for name in ("interleaved", "rotary_embedding_dim"))
    return (*rotation.inputs[1:3], *numbers)
