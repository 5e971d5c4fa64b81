"""Activations and caches rounded to few bits in floating point: what quantizing them would do, without a kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from graphopt.analysis.structure.ports import past_port
from graphopt.analysis.structure.product_codes import dequantize_of, rounding_of
from graphopt.analysis.structure.products import lm_head_nodes
from graphopt.graph.diagnostics import Effect, Rule
from graphopt.graph.editing import insert_in_front
from graphopt.graph.weights import weight_of
from graphopt.passes.base import Pass
from graphopt.runtime_ops.round_trip.spec.op import ROUND_TRIP

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphopt.passes.context import Context, Ledger

INPUT = Rule("emulate_quantization.input", "emulated: {input} as int{bits} per token, read by {readers}")
CACHE = Rule(
    "emulate_quantization.cache",
    "emulated: {tensor} enters {cache} as uint{bits}, per token and head, from its least number",
)
LOGITS = Rule("emulate_quantization.logits", "it makes the logits: its input is left in floating point")
SHARED = Rule("emulate_quantization.shared", "it shares its rounded input with the product that makes the logits")
ROUNDED = Rule("emulate_quantization.rounded", "its input is really rounded to few bits or token by token")
OTHER_PRODUCT = Rule(
    "emulate_quantization.other-product", "{op_type} is not a product with a constant matrix on its right"
)
NO_CACHE = Rule("emulate_quantization.no-cache", "the graph has no input past_key_values")
ENTRY_UNKNOWN = Rule(
    "emulate_quantization.entry-unknown",
    "where new tokens enter this cache is not known; it is read by: {readers}",
)
LAYOUT_UNKNOWN = Rule(
    "emulate_quantization.layout-unknown", "{tensor} is not known to be [batch, heads, length, head size]"
)

Share = Annotated[float, Field(gt=0.0, le=1.0)]

_NEW_BESIDE_PAST = {4: 1, 5: 2}  # inputs of ``Attention``: past key and key, past value and value


class EmulateQuantization(Pass):
    """Round inputs of products, and keys and values, as if they were stored in few bits. An emulation, not a speed-up.

    before::

        y = MatMul(x, W)                  o, present = Attention(q, k, v, mask, past)

    after::

        y = MatMul(RoundTrip(x), W)       o, present = Attention(q, RoundTrip(k), RoundTrip(v), mask, past)

    ``RoundTrip`` rounds each row (a token; for k and v a token of one head) to ``bits`` bits with a scale of its own
    and turns it back, x' = code * scale + offset. Everything stays in floating point, nothing gets smaller or faster:
    the graph computes what kernels on such codes would compute, so that their error can be measured. Activations have
    offset 0; k and v are rounded between the row's least and largest number. A tensor that several products read is
    rounded once. W may be a float matrix or one that is dequantized. An input that ``RoundActivations`` rounds to int8
    or more in groups is emulated in front of it; one that it rounds to 4 bits, or token by token, stays. Queries
    keep their numbers, and so does the input of the product that makes the logits, as in the evaluations of QuaRot
    (Ashkboos et al. 2024).

    Bits of activations and of the cache (``None`` leaves them alone), and the share of a row's range each keeps.

    A share below 1 cuts a row's largest numbers off, which leaves a finer scale to all others.
    """

    name: ClassVar[str] = "emulate_quantization"
    effect: ClassVar[Effect] = "lossy"
    after: ClassVar[tuple[str, ...]] = (
        "quantize_weights",
        "quantize_activations",
    )

    activations: Literal[4, 8] | None = 4
    cache: Literal[4, 8] | None = None
    clip: Share = 1.0
    cache_clip: Share = 1.0

    def rewrite(self, model: ir.Model, context: Context) -> None:
        """Round what the options name; say why anything else keeps its numbers."""
        ledger = context.ledger
        if self.activations is not None:
            self._round_activations(model.graph, self.activations, ledger)
        if self.cache is not None:
            self._round_caches(model.graph, self.cache, ledger)

    def _round_activations(self, graph: ir.Graph, bits: int, ledger: Ledger) -> None:
        lm_heads = lm_head_nodes(graph)
        readers: dict[ir.Value, list[ir.Node]] = {}
        for node in graph:
            if node in lm_heads:
                ledger.skipped(node, LOGITS())
            elif _multiplies_by_a_matrix(node):
                rounding = rounding_of(node)
                if rounding is not None and _is_rounded(rounding):
                    ledger.skipped(node, ROUNDED())
                    continue
                reader = rounding or node
                if reader is not node and any(use.node in lm_heads for use in reader.outputs[0].uses()):
                    ledger.skipped(node, SHARED())
                elif (x := reader.inputs[0]) is not None and reader not in readers.setdefault(x, []):
                    readers[x].append(reader)
            elif _has_weights(node):
                ledger.skipped(node, OTHER_PRODUCT(op_type=node.op_type))
        for x, nodes in readers.items():
            attributes = {"bits": bits, "symmetric": 1, "clip": self.clip}
            rounded = ROUND_TRIP.node([x], attributes, name=f"{x.name}.round_trip")
            made = insert_in_front(nodes[0], 0, rounded)
            for node in nodes[1:]:
                node.replace_input_with(0, made)
            read = [node.name or "?" for node in nodes]
            ledger.changed(rounded, INPUT(input=x.name, bits=bits, readers=read), nodes)

    def _round_caches(self, graph: ir.Graph, bits: int, ledger: Ledger) -> None:
        caches = [value for value in graph.inputs if past_port(value) is not None]
        if not caches:
            ledger.skipped("cache", NO_CACHE())
        for past in caches:
            uses = [use for use in past.uses() if use.node.op_type != "Shape"]
            entry = _entry(uses[0].node, uses[0].idx) if len(uses) == 1 else None
            if entry is None:
                ledger.skipped(past, ENTRY_UNKNOWN(readers=[use.node.op_type for use in uses]))
                continue
            node, position = entry
            new = node.inputs[position]
            assert new is not None
            if new.shape is None or len(new.shape) != 4:
                ledger.skipped(past, LAYOUT_UNKNOWN(tensor=new.name))
                continue
            attributes = {"bits": bits, "symmetric": 0, "clip": self.cache_clip}
            rounded = ROUND_TRIP.node([new], attributes, name=f"{past.name}.round_trip")
            insert_in_front(node, position, rounded)
            ledger.changed(rounded, CACHE(tensor=new.name, cache=past.name, bits=bits), [node])


def _multiplies_by_a_matrix(node: ir.Node) -> bool:
    """Whether ``node`` is ``MatMul(x, W)`` for a constant matrix W, stored as floats or as codes."""
    if node.op_type != "MatMul" or node.domain:
        return False
    dequantize = dequantize_of(node)
    stored = weight_of(node, 1) if dequantize is None else weight_of(dequantize, 0)
    return stored is not None and stored.const_value is not None and stored.const_value.shape.rank() == 2


def _is_rounded(rounding: ir.Node) -> bool:
    return rounding.attributes.get_string("activations", "") == "uint4" or not rounding.attributes.get_int("group", 0)


def _has_weights(node: ir.Node) -> bool:
    names = ("MatMul", "Gemm", "MatMulNBits", "Conv")
    return node.op_type in names and any(weight_of(node, position) is not None for position in range(2))


def _entry(node: ir.Node, position: int) -> tuple[ir.Node, int] | None:
    """Return by which input new tokens join the past that ``node`` reads as input ``position``."""
    if node.op_type == "Attention" and position in _NEW_BESIDE_PAST:
        return node, _NEW_BESIDE_PAST[position]
    if node.op_type == "Concat" and position == 0 and len(node.inputs) == 2:
        return node, 1
    return None
