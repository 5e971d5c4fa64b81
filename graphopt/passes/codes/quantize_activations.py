"""Inputs of products with stored codes are rounded at run time, token by token, so that integers are multiplied."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import onnx_ir as ir
from pydantic import Field, model_validator

from graphopt.analysis.structure.product_codes import NOT_QUANTIZED, StoredCodes, coded_nodes, rounding_of, stored_codes
from graphopt.analysis.structure.products import linear_nodes, lm_head_nodes, router_nodes
from graphopt.graph.diagnostics import Effect, Fact, Rule
from graphopt.passes.base import Pass
from graphopt.passes.common.input_rounding import forget_spared, input_of, is_spared, round_input

if TYPE_CHECKING:
    from graphopt.passes.context import Context, Ledger

LM_HEAD = Rule(
    "quantize_activations.lm-head", "it makes the logits: its input is rounded only if the recipe asks for it"
)
ROUTER = Rule("quantize_activations.router", "it chooses experts: its input is left alone")
ALREADY = Rule("quantize_activations.already", "its input is already rounded to {activations} per token")
NOT_FLOAT = Rule("quantize_activations.not-float", "its input is {type}, and inputs are rounded in float")


class QuantizeActivations(Pass):
    """Round the inputs of products with quantized weights to integers, one scale per token or per group.

    before::

        y = MatMul(x, DequantizeLinear(codes, scales; axis=0, block_size=group))

    after::

        y = MatMul(ai.graphopt::RoundActivations(x; activations, group, clip), DequantizeLinear(codes, scales; ...))

    A token's scale is s = clip max|x| / (2^(bits-1) - 1), its codes are q = round(x / s), cut off at either end, and
    y = s q W: a product of integers (QuaRot, Ashkboos et al. 2024, section 4), which the step ``lower`` makes of it,
    with a rotation in front inside.

    With scales per group each group of the weight has a scale of inputs, too, so a large input takes codes from its
    neighbours alone, and not from the whole token. With 4 bits a group has a zero point z: s = (high - low) / 15, z =
    round(-low / s), q = round(x / s) from -z to 15 - z, where low and high are the least and the largest number of the
    group and 0. The group's 16 codes then reach from one to the other; 15 codes from -max|x| to max|x| would have steps
    that are a third wider for groups of 32 normal numbers. q are still small integers: z costs a product nothing.

    An input that the step ``spare_inputs`` noted has 8 bits, and otherwise what others have.
    A tensor that several products read is rounded once. Products with codes of any
    format are rewritten likewise, and what the graph said about their inputs is replaced. A product that chooses
    experts is left alone, and so is the lm_head unless the options ask for it.

    Attributes:
        bits: of an input. One that ``spare_inputs`` spared has 8.
        scales: "token": all inputs of a token have one scale; "group": each group of inputs that the weight has a
            scale for has one too, and with 4 bits a zero point. Groups need a CPU: GPUs have no kernel for them with 4
            bits.
        clip: the share of a token's range that codes reach. A share below 1 cuts a token's largest numbers off, which
            leaves a finer scale to all others. Groups keep all of their range.
        lm_head: whether the input of the product that makes the logits is rounded too.
    """

    name: ClassVar[str] = "quantize_activations"
    effect: ClassVar[Effect] = "lossy"
    after: ClassVar[tuple[str, ...]] = ("quantize_weights",)

    bits: Literal[4, 8] = 8
    scales: Literal["token", "group"] = "token"
    clip: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    lm_head: bool = False

    @model_validator(mode="after")
    def _groups_keep_their_range(self) -> QuantizeActivations:
        if self.scales == "group" and self.clip != 1:
            raise ValueError(f"no kernel cuts off the range of a group: leave clip out, or at 1; it is {self.clip}")
        return self

    def rewrite(self, model: ir.Model, context: Context) -> None:
        """Rewrite every product with stored codes; say why any other product with a matrix stays."""
        ledger = context.ledger
        graph = model.graph
        lm_heads, routers = lm_head_nodes(graph), router_nodes(graph)
        for node in linear_nodes(graph):
            ledger.skipped(node, NOT_QUANTIZED())
        for node in coded_nodes(graph):
            if node in lm_heads and not self.lm_head:
                ledger.skipped(node, LM_HEAD())
            elif node in routers - lm_heads:
                ledger.skipped(node, ROUTER())
            else:
                self._round(graph, node, ledger)
        forget_spared(graph)

    def _round(self, graph: ir.Graph, node: ir.Node, ledger: Ledger) -> None:
        x, codes, rounding = input_of(node), stored_codes(node), rounding_of(node)
        if rounding is not None and not rounding.attributes.get_int("group", 0) and self.scales == "token":
            activations = rounding.attributes.get_string("activations", "")
            ledger.skipped(node, ALREADY(activations=activations))
        elif x.dtype is not None and x.dtype != ir.DataType.FLOAT:
            ledger.skipped(node, NOT_FLOAT(type=str(x.dtype)))
        elif isinstance(codes, Fact):
            ledger.skipped(node, codes)
        else:
            round_input(graph, node, self._attributes(codes, 8 if is_spared(x) else self.bits), ledger)

    def _attributes(self, codes: StoredCodes, bits: int) -> dict[str, Any]:
        if self.scales == "token":
            # A range is cut off for the sake of few codes.
            clip = self.clip if bits == self.bits else 1.0
            return {"activations": f"int{bits}", "group": 0, "clip": clip}
        return {"activations": "uint4" if bits == 4 else "int8", "group": codes.group, "clip": 1.0}
