"""Products with stored codes get the layout and the kernel that the target runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, Self

import numpy as np
import onnx_ir as ir

from graphopt.analysis.structure.experts import expert_products
from graphopt.analysis.structure.product_codes import (
    LOGICAL,
    StoredCodes,
    codebook_of,
    coded_nodes,
    codes_of_reader,
    column_lookups,
    dequantize_of,
    is_dequantize,
    rounding_of,
    stored_codes,
    table_readers,
)
from graphopt.errors import InputError
from graphopt.graph.diagnostics import Effect, Fact, Rule
from graphopt.graph.editing import Inserter, drop, replace, shared_constant
from graphopt.passes.base import Pass
from graphopt.passes.common.formats import Activations
from graphopt.passes.common.fusible import keep_fusible
from graphopt.passes.common.logical_codes import set_type
from graphopt.passes.common.lookups import gather_packed, gather_standard, lookups_of
from graphopt.passes.common.packing import PackedMatrix, pack_matrix
from graphopt.runtime_ops import DOMAIN, OPERATORS
from graphopt.runtime_ops.costs import Choice, Costs, estimate, shipped_costs
from graphopt.runtime_ops.dequantize_trellis.spec.op import are_bytes
from graphopt.runtime_ops.instructions import instructions_here
from graphopt.runtime_ops.matmul_table.spec.activations import ON_GPUS
from graphopt.runtime_ops.schema import attributes_of
from graphopt.util.targets import InstructionSet, Target

if TYPE_CHECKING:
    from graphopt.passes.context import Context, Ledger
    from graphopt.passes.recipe import Recipe

_WIDE = "; scales are float32, float16 does not hold all of them"
PACKING = Rule(
    "lower.packed",
    "MatMulTable, inputs rounded to {activations} in groups of {group}",
    wide=_WIDE,
    reason=": {reason}",
)
PACKED_EXACT = Rule("lower.packed-exact", "MatMulTable, inputs as they are", wide=_WIDE, reason=": {reason}")
PACKED_DYNAMIC = Rule(
    "lower.packed-dynamic",
    "MatMulDynamic, inputs rounded to int{bits} per token",
    rotation=", {rotation} inside",
    wide=_WIDE,
)
PACKED_CODEBOOK = Rule("lower.packed-codebook", "MatMulCodebook, inputs as they are")
PORTABLE = Rule("lower.portable", "the target is portable: it keeps its standard form")
BYTES_IN_BLOCKS = Rule(
    "lower.bytes-in-blocks", "the CUDA provider has no kernel for 8 bits in blocks: a cast, and a product with scales"
)
EXPERT = Rule("lower.expert", "experts share one node, whose kernel reads this layout")
NOT_FLOAT = Rule("lower.not-float", "its input is {type}, and MatMulTable reads float")

_PER_TOKEN = {"int8": 8, "int4": 4}


class Lower(Pass):
    """Pack codes, and choose for each product between onnxruntime's kernel and graphopt's.

    before::

        y1 = MatMul(RoundActivations(x; activations, group), Dequantize(codes, scales, table, zero points; group))
        y2 = MatMul(RoundActivations(Hadamard(x, left, right); bits per token, clip), ...)
        y3 = MatMul(x, DequantizeLinear(codes, scales; axis=0, block_size=group))
        y4 = MatMul(x, DequantizeTrellis(codes, scales, tables; bits, group))             likewise
        y5 = MatMul(x, DequantizeCodebook(codes, scales, levels, ...))
        e = Gather(Transpose(W), ids)                   W, the matrix of one of these products
        r = DequantizeLinear(Gather(codes8, ids), Gather(scales, ids), zero points; axis, block_size)

    after::

        y1 = ai.graphopt::MatMulTable(x, packed codes, scales, table, zero points, 0; group, activations)
        y2 = ai.graphopt::MatMulDynamic(x, packed codes, ..., 0, left, right; group, bits, clip)
        y3 = MatMul(x, DequantizeLinear(...))  or  ai.graphopt::MatMulTable(x, ...; activations)
        y4 = ai.graphopt::MatMulTable(x, packed codes, scales, tables, 0, 0; group, activations, trellis)
        y5 = ai.graphopt::MatMulCodebook(x, codes, scales, levels, ...)
        e = ai.graphopt::GatherTable(ids, packed codes, scales, table, zero points)  or  standard operators of codes
        r = (Cast(codes of the rows) - Cast(zero points)) * scales                       for ``ort-cuda``
        Max(y3, 0) for Relu(y3), and a reshape between two DequantizeLinear of one product: see ``fusible``

    Codes, scales and zero points are the same numbers in another layout, so W stays bit for bit. A rounding that the
    graph states becomes a part of the product, and so does a rotation that only this product reads. Where the graph
    states none and ONNX has the form, the target decides: ``portable`` keeps it; for ``ort-cpu`` it becomes
    ``MatMulTable`` where graphopt's kernel was measured to be faster with the instruction set of the machine that
    optimizes, or the one named as in ``--target ort-cpu:avx2``, and for all experts of a mixture, which the step
    ``group_experts`` puts into one node; for ``ort-cuda`` where it can. onnxruntime fuses the
    standard form into ``MatMulNBits``, which rounds x to int8 in groups unless a session entry forbids it;
    ``MatMulTable`` says in the graph what x is rounded to. The graph then means that rounding, where before it meant
    none: the pass counts as lossy, and is measured. With ``bfloat16`` the product rounds the table too. For GPUs the
    report states an estimate, from bytes and a nominal bandwidth.

    Every recipe has this step: one that does not name it gets it at its place, for the target ``portable``.

    Attributes:
        target: ``portable``: any onnxruntime; every product stays in the standard form where it has one. ``ort-cpu``:
            onnxruntime on a CPU with graphopt's library registered. ``ort-cuda``: the same on an NVIDIA GPU.
        instructions: the instruction set of that CPU, by whose costs kernels are chosen. ``None``: of the machine that
            optimizes, which the manifest then names.
        activations: what the inputs of products that leave the standard form are rounded to; ``None`` for what the
            recipe says, on a GPU ``float32``.
        caches: what a recipe for graphopt's kernels does with caches that grow, where no other step is about caches:
            ``pages`` adds the step ``page_kv``, so that they are written in place; ``growing`` leaves
            ``past_key_values.N.key`` and ``present.N.key`` as they are, for programs that feed those.
    """

    name: ClassVar[str] = "lower"
    effect: ClassVar[Effect] = "lossy"
    after: ClassVar[tuple[str, ...]] = ("merge_products",)

    target: Target = "portable"
    instructions: InstructionSet | None = None
    activations: Activations | None = None
    caches: Literal["pages", "growing"] = "pages"

    @classmethod
    def is_needed(cls, graph: ir.Graph, recipe: Recipe) -> bool:
        """Return true: every recipe has this step."""
        del graph, recipe
        return True

    def on_this_machine(self) -> Self:
        """Return the pass with the instruction set of this machine where it is for ``ort-cpu`` and names none."""
        if self.target != "ort-cpu" or self.instructions:
            return self
        return self.model_copy(update={"instructions": instructions_here()})

    def rewrite(self, model: ir.Model, context: Context) -> None:
        """Pack what the standard has no form for, and what the target runs faster; say why the others stay."""
        ledger = context.ledger
        experts = expert_products(model.graph) if self.target == "ort-cpu" else set()
        for node in coded_nodes(model.graph):
            codes, rounding = stored_codes(node), rounding_of(node)
            if isinstance(codes, StoredCodes):
                self._check_kernel(node, codes)
            if rounding is not None:
                self._lower_rounded(model.graph, node, _require_codes(node, codes), rounding, ledger)
            elif isinstance(codes, Fact):
                ledger.skipped(node, codes)
            elif not codes.is_standard:
                _replace(model.graph, node, codes, "float32", ledger)
            elif node in experts:
                _replace(model.graph, node, codes, self.activations or "int8", ledger, reason=EXPERT())
            else:
                self._choose(model.graph, node, codes, ledger)
            if not isinstance(codes, Fact) and column_lookups(codes.reader):
                gather_standard(model.graph, codes, ledger, node.name or "?")
        for table_reader in table_readers(model.graph):
            codes = codes_of_reader(table_reader)
            assert isinstance(codes, StoredCodes)
            _pack(model.graph, table_reader, codes, ledger)
        for node in model.graph:
            if (reader := codebook_of(node)) is not None:
                self._multiply_entries(node, reader, ledger)
        in_blocks = [node for node in model.graph if self.target == "ort-cuda" and _is_in_blocks_of_bytes(node)]
        for reader in in_blocks:
            _multiply_by_scales(model.graph, reader, ledger)
        standard = [node for node in model.graph if dequantize_of(node) is not None]
        keep_fusible(model.graph, standard, ledger)

    def ensures(self, model: ir.Model) -> None:
        """Promise also that nothing logical is left, which has no kernel."""
        super().ensures(model)
        remaining = [node for node in model.graph if node.domain == DOMAIN and node.op_type in LOGICAL]
        if remaining:
            raise ir.passes.PostconditionError(
                f"{self.name} left {remaining[0].op_type} {remaining[0].name}: "
                "it stands in front of no product with stored codes"
            )

    def _check_kernel(self, node: ir.Node, codes: StoredCodes) -> None:
        """Refuse what the target, or every kernel, cannot read."""
        if codes.minimums and self.target == "ort-cuda":
            raise InputError(
                "kernels on GPUs know no minimums, which a weight of the node has",
                node=node.name,
                remedy="apply the recipe with --target ort-cuda from the start: keep_codes makes zero points then",
            )
        if not codes.is_trellis:
            return
        if not are_bytes(codes.values, codes.bits):
            raise InputError(
                f"kernels multiply sums of a trellis as bytes, and those of the node's {codes.bits} bits are none",
                node=node.name,
                remedy="round both tables to multiples of one power of two, whose sums are 127 of it at most",
            )

    def _multiply_entries(self, node: ir.Node, reader: ir.Node, ledger: Ledger) -> None:
        """Make one node of a product and the codes of vectors that it reads."""
        x = node.inputs[0]
        if self.target == "ort-cuda":
            raise InputError(
                "kernels on GPUs know no codes of vectors, which a weight of the node is",
                node=node.name,
                remedy="leave out keep_codes, or choose --target ort-cpu",
            )
        new = OPERATORS["MatMulCodebook"].node([x, *reader.inputs], attributes_of(reader), name=node.name)
        replace(node, new)
        ledger.changed(new, PACKED_CODEBOOK(), [reader, node])

    def _choose(self, graph: ir.Graph, node: ir.Node, codes: StoredCodes, ledger: Ledger) -> None:
        if self.target == "portable":
            ledger.skipped(node, PORTABLE())
            return
        choice, x = self._compare(codes), node.inputs[0]
        if not choice.is_faster:
            ledger.skipped(node, choice.reason)
        elif x is not None and x.dtype not in (None, ir.DataType.FLOAT):
            ledger.skipped(node, NOT_FLOAT(type=str(x.dtype)))
        else:
            on_gpu = self.target == "ort-cuda"
            activations = "float32" if on_gpu else self.activations or "int8"
            _replace(graph, node, codes, activations, ledger, reason=choice.reason)

    def _compare(self, codes: StoredCodes) -> Choice:
        if self.target == "ort-cuda":
            return estimate(*codes.shape, codes.bits)
        instructions = self.instructions or instructions_here()
        return shipped_costs().compare(codes.bits, instructions)

    def _lower_rounded(
        self, graph: ir.Graph, node: ir.Node, codes: StoredCodes, rounding: ir.Node, ledger: Ledger
    ) -> None:
        attributes = rounding.attributes
        activations, group = attributes.get_string("activations", ""), attributes.get_int("group", 0)
        clip = attributes.get_float("clip", 1.0)
        if not group and activations in _PER_TOKEN:
            _replace_dynamic(graph, node, codes, rounding, _PER_TOKEN[activations], ledger)
        elif activations not in ON_GPUS and self.target == "ort-cuda":
            raise InputError(
                f"no kernel on a GPU rounds its input to {activations} in groups of {group}",
                node=node.name,
                remedy="give quantize_activations `scales: token`, or choose --target ort-cpu",
            )
        elif clip == 1 and (group == codes.group or activations == "bfloat16") and activations != "int4":
            _replace(graph, node, codes, activations, ledger, rounding=rounding)
        else:
            raise InputError(
                f"no product of graphopt rounds its input to {activations} in groups of {group} with clip {clip:g} in "
                f"front of codes in groups of {codes.group}",
                node=node.name,
                remedy="int8, int16 and uint4 go with the groups of the weight, int8 and int4 with whole tokens",
            )


def lower_model(model: ir.Model) -> ir.Model:
    """Return what runs of ``model``: itself where nothing in it is logical, else a copy that is lowered, portable."""
    logical = (node.domain == DOMAIN and node.op_type in LOGICAL for node in model.graph)
    if not any(logical) and not any(column_lookups(node) for node in model.graph if is_dequantize(node)):
        return model
    copy = model.clone()
    Lower()(copy)
    return copy


def _require_codes(node: ir.Node, codes: StoredCodes | Fact) -> StoredCodes:
    if isinstance(codes, Fact):
        raise InputError(f"its input is rounded for a product of codes, but {codes}", node=node.name)
    return codes


def _replace(
    graph: ir.Graph,
    node: ir.Node,
    codes: StoredCodes,
    activations: str,
    ledger: Ledger,
    *,
    rounding: ir.Node | None = None,
    reason: Fact | None = None,
) -> None:
    x, sources = (
        (rounding or node).inputs[0],
        [source for source in (codes.reader, rounding, node) if source is not None],
    )
    assert x is not None
    attributes = {"activations": activations}
    matrix = _pack(graph, node, codes, ledger)
    new = matrix.node(OPERATORS["MatMulTable"], x, (), attributes, node.name or "")
    if activations == "float32":
        fact = PACKED_EXACT(reason=reason, wide=matrix.wide)
    else:
        fact = PACKING(activations=activations, group=codes.group, reason=reason, wide=matrix.wide)
    replace(node, new)
    ledger.changed(new, fact, sources)


def _pack(graph: ir.Graph, node: ir.Node, codes: StoredCodes, ledger: Ledger) -> PackedMatrix:
    """Return the matrix of ``node`` in our layout; lookups of its columns read it too."""
    matrix = pack_matrix(graph, codes)
    gather_packed(graph, lookups_of(graph, codes), matrix, ledger, node.name or "?")
    return matrix


def _is_in_blocks_of_bytes(node: ir.Node) -> bool:
    """Return whether ``node`` dequantizes 8 bits in blocks that are computed, as rows that were looked up are.

    onnxruntime's CUDA provider takes such a node and fails when it runs: "Unsupported quantization type".
    """
    if (node.domain, node.op_type) != ("", "DequantizeLinear") or not node.attributes.get_int("block_size", 0):
        return False
    codes = node.inputs[0]
    return codes is not None and codes.const_value is None and codes.dtype in (ir.DataType.INT8, ir.DataType.UINT8)


def _multiply_by_scales(graph: ir.Graph, reader: ir.Node, ledger: Ledger) -> None:
    """Let three standard operators do what ``reader``, a ``DequantizeLinear`` in blocks, does."""
    codes, scales, zeros = (*reader.inputs, None)[:3]
    assert codes is not None and codes.shape is not None and scales is not None and scales.shape is not None
    axis, block = reader.attributes.get_int("axis", 1) % len(codes.shape), reader.attributes.get_int("block_size", 0)
    insert, dtype, dims = Inserter(graph, reader, reader.name or "dequantize"), scales.dtype, list(codes.shape)
    size = dims[axis]
    if not isinstance(size, int):
        raise InputError(
            f"DequantizeLinear in blocks of an axis of unknown size {size}, for which CUDA has no kernel",
            node=reader.name,
            remedy="export the model with this axis fixed, or choose --target ort-cpu",
        )
    # what is behind the last block of a whole row is broadcast; other blocks are repeated to their numbers
    blocks = None if block >= size else insert.integers([index // block for index in range(size)])

    def of_numbers(value: ir.Value, suffix: str) -> ir.Value:
        return value if blocks is None else insert.op("Gather", [value, blocks], dims, value.dtype, suffix, axis=axis)

    numbers = insert.op("Cast", [codes], dims, dtype, "numbers", to=dtype)
    if zeros is not None:
        cast = insert.op("Cast", [zeros], list(zeros.shape or []), dtype, "zeros", to=dtype)
        numbers = insert.op("Sub", [numbers, of_numbers(cast, "zeros_of_numbers")], dims, dtype, "differences")
    product = ir.node("Mul", [numbers, of_numbers(scales, "scales")], name=reader.name)
    set_type(product.outputs[0], reader.outputs[0].name or "", dtype, dims)
    replace(reader, product)
    for node in (*insert.nodes, product):
        ledger.changed(node, BYTES_IN_BLOCKS(), [reader])


def _replace_dynamic(
    graph: ir.Graph, node: ir.Node, codes: StoredCodes, rounding: ir.Node, bits: int, ledger: Ledger
) -> None:
    x, rotation = rounding.inputs[0], _rotation_in_front(rounding)
    assert x is not None
    unit_matrix = shared_constant(graph, "no_rotation", np.ones((1, 1), np.int8))
    matrices, sources = (unit_matrix, unit_matrix), [codes.reader, rounding, node]
    if rotation is not None:
        x, remaining, right = (value for value in rotation.inputs if value is not None)
        matrices, sources = (remaining, right), [*sources, rotation]
    attributes = {"bits": bits, "clip": rounding.attributes.get_float("clip", 1.0)}
    matrix = _pack(graph, node, codes, ledger)
    new = matrix.node(OPERATORS["MatMulDynamic"], x, matrices, attributes, node.name or "")
    fact = PACKED_DYNAMIC(bits=bits, rotation=None if rotation is None else rotation.name, wide=matrix.wide)
    replace(node, new)
    ledger.changed(new, fact, sources)
    drop(graph, unit_matrix)


def _rotation_in_front(rounding: ir.Node) -> ir.Node | None:
    """Return the ``Hadamard`` whose product ``rounding`` rounds, where one product alone reads either."""
    x = rounding.inputs[0]
    producer = None if x is None else x.producer()
    if x is None or producer is None or producer.domain != DOMAIN or producer.op_type != "Hadamard":
        return None
    is_only_reader = len(x.uses()) == 1 and not x.is_graph_output() and len(rounding.outputs[0].uses()) == 1
    return producer if is_only_reader else None


__all__ = ["Costs", "Lower", "Target", "lower_model", "shipped_costs"]
