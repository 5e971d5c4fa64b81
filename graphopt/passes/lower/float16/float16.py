"""The graph computes in float16: half the bytes, and the type that the matrix units of GPUs are made for."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import onnx_ir as ir

from graphopt.errors import InputError
from graphopt.graph.diagnostics import Effect, Rule
from graphopt.passes.base import Pass
from graphopt.passes.lower.float16.casts import Casts, keep_outputs
from graphopt.passes.lower.float16.convert import convert_weights, narrow_values, retype
from graphopt.passes.lower.float16.wide import NARROW, STAYS_FLOAT32, WIDE, follows, wide_nodes

if TYPE_CHECKING:
    from graphopt.passes.context import Context

IN_FLOAT16 = Rule("float16.narrowed", "{op} in float16")


class Float16(Pass):
    """Compute in float16 what was computed in float32.

    before::

        y = Op(x, W)                                        float32

    after::

        y = Op(x, W')    W' = float16(W)                    float16

    Caches that grow become float16 too; pages keep their storage. Logits and other outputs are float32 as before, by a
    ``Cast``. What sines and cosines are made of stays float32: a position beyond 2048 is no float16. So does what an
    operator takes in float32 alone, and a weight with a number beyond 65504, with its readers. A constant of one number
    beyond that which is added, chosen or compared, as masks have them, becomes 65504. Codes of weights stay as they
    are; scales of ``DequantizeLinear`` become float16 where they have its range, those of graphopt's operators stay.

    Rounding is 2^-11 of each number where float32 has 2^-24, so the pass is lossy, and measured. What overflows is not
    looked for: a model whose activations pass 65504 comes out as NaN, and the check after the recipe says so.

    The place of this step is the end of a recipe: passes before it see a graph of float32.
    """

    name: ClassVar[str] = "float16"
    effect: ClassVar[Effect] = "lossy"
    after: ClassVar[tuple[str, ...]] = (
        "tie_embedding",
        "lower",
        "group_experts",
        "fuse_residuals",
        "fuse_gates",
        "fuse_rotary",
    )

    def rewrite(self, model: ir.Model, context: Context) -> None:
        """Choose what is narrow, convert constants and types, and set casts between both kinds."""
        ledger = context.ledger
        graph, opset = model.graph, model.opset_imports[""]
        for node in graph:
            if any(
                attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
                for attribute in node.attributes.values()
            ):
                raise InputError(
                    f"{node.op_type} has graphs of its own, and the step float16 does not look into those",
                    node=node.name,
                    remedy="leave the step out, or take the branch that you need before it",
                )
            for value in node.outputs:
                if value.name and value.dtype is None:
                    raise InputError("the type of a value is not known", node=node.name, tensor=value.name)
        wide = wide_nodes(graph, opset)
        for node, reason in wide.items():
            if any(attribute is not None and attribute.dtype == WIDE for attribute in (*node.inputs, *node.outputs)):
                ledger.skipped(node, STAYS_FLOAT32(why=reason))
        convert_weights(graph, wide, ledger)
        narrow = narrow_values(graph, wide)
        for value in narrow:
            # Not its dtype: copies of the graph share the type.
            value.type = ir.TensorType(NARROW)
        for node in graph:
            if any(attribute in narrow for attribute in node.outputs):
                retype(node)
                ledger.changed(node, IN_FLOAT16(op=node.op_type))
        casts = Casts(graph, ledger)
        for reader in list(graph):
            for index, operand in enumerate(reader.inputs):
                if operand is not None and reader.op_type != "Cast":  # which takes any type
                    dtype = NARROW if follows(reader, index, wide) else WIDE
                    if operand.dtype == WIDE != dtype or (operand in narrow and dtype == WIDE):
                        reader.replace_input_with(index, casts.cast(operand, dtype))
        keep_outputs(graph, narrow, casts)


__all__ = ["Float16"]
