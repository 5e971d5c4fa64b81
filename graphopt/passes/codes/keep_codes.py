"""Weights that came from codes of a file are stored as these codes again, and not rounded once more."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
import onnx_ir as ir

from graphopt.analysis.structure.products import linear_nodes, token_lookups
from graphopt.errors import InputError
from graphopt.graph.diagnostics import Effect, Fact, Rule
from graphopt.graph.editing import drop, replace, shared_constant
from graphopt.graph.weights import Array, Part, WeightTensor, blocks_of, expression_of, new_weight, weight_of
from graphopt.passes.base import Pass
from graphopt.passes.common.formats import Activations
from graphopt.passes.common.input_rounding import round_input
from graphopt.passes.common.logical_codes import columns_of, dequantize, set_type
from graphopt.passes.common.tied_embedding import look_up_columns, tied_lookups
from graphopt.quantization.checkpoints.importer import coded_matrices
from graphopt.quantization.entry_codes import EntryCoding, KeptEntries
from graphopt.quantization.gguf.codes import GgmlCodes, has_codes
from graphopt.quantization.gguf.entries import GgmlEntries, has_entries
from graphopt.quantization.gguf.file import open_gguf
from graphopt.quantization.matrix_codes import CodedTensor, KeptCodes, StackedCodes, stacking_of
from graphopt.runtime_ops.dequantize_codebook.spec.op import DEQUANTIZE_CODEBOOK

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from graphopt.passes.context import Context, Ledger

CODES_KEPT = Rule(
    "keep_codes.kept",
    "{weight} as the file's {kind}: {format} in groups of {group}",
    in_order="; its input is put in the order of the groups",
)
LOOKED_UP = Rule("keep_codes.looked-up", "{part} of {table} looked up")
NOT_OF_FILE = Rule("keep_codes.not-of-file", "the file has no codes of these numbers")
NO_LOOKUP = Rule(
    "keep_codes.no-lookup", "no lookup reads codes of vectors, or columns in another order, as {kind} has them"
)
NOT_USED = Rule(
    "keep_codes.not-used",
    "no product and no lookup has these numbers: a step has changed them, or they are a stack of experts, which the "
    "step canonicalize takes apart",
)
ON_CPUS = Rule("keep_codes.on-cpus", "kernels on GPUs know no codes of vectors, as {kind} has them")
INPUT_ORDER = Rule("keep_codes.reordered", "{input} in the order of the groups of {weight}")

# For each row of numbers that a tensor of the file means: the tensors' names and the row of each.
_Rows = dict[bytes, dict[str, int]]


class _Match(NamedTuple):
    """Where the numbers of a weight lie in the file.

    Attributes:
        tensor: the tensor, or several of one coding.
        rows: which of its rows they are, in order.
        names: of all tensors of the file that have some of these rows.
    """

    tensor: CodedTensor
    rows: Array
    names: set[str]


class KeepCodes(Pass):
    """Store matrices and the token embedding as the codes of the file that they were decoded from.

    The file is a GGUF file, or the folder of a checkpoint that a quantizer wrote.

    before::

        y = MatMul(x, W)                                   e = Gather(E, ids)

    after, where column n of W is row r(n) of a tensor of the file, and so are the rows of E::

        y = MatMul(x, DequantizeLinear(codes[:, r], scales[:, r]; axis=0, block_size=32))             Q4_0, Q8_0
        y = MatMul(x, Dequantize(codes[:, r], scales[:, r], table, minimums[:, r]; group))            Q6_K, Q4_1, ...
        y = MatMul(x, DequantizeLinear(codes[:, r], scales[:, r], zero points[:, r]; axis=0, block_size))     GPTQ, AWQ
        y = MatMul(Gather(x, order), DequantizeLinear(codes[order, r], ...))                  GPTQ, by activation
        y = MatMul(x, DequantizeCodebook(codes[r], scales[r], levels[r], books, ...))             IQ1, IQ2 and IQ3 types
        e = DequantizeLinear(Gather(codes, ids), Cast(Gather(scales, ids)); axis=-1)                  Q8_0
        e = Gather(Transpose(Dequantize(codes[:, r], scales[:, r], ...)), ids)                        fewer bits: Q6_K
        e = Gather(Transpose(W), ids)                  W the matrix of the lm_head, by Dequantize     tied, any type

    Rows are found by their content, all of it, so no name and no layout has to be known, and a weight that another step
    has changed is left alone. W is the file's to the last bit. For the target ``ort-cuda``, whose kernels know no
    minimums, types that have them (Q4_1, Q5_1, Q4_K, Q5_K) get zero points in float32, which moves a weight by about
    2^-23 of the larger of scale times code and minimum. See :mod:`graphopt.quantization.gguf.codes`
    and :mod:`graphopt.quantization.checkpoints`.

    Attributes:
        file: the GGUF file, or the folder of the quantized checkpoint.
        activations: what the inputs of products are rounded to where ONNX has no form for their weights.
    """

    name: ClassVar[str] = "keep_codes"
    effect: ClassVar[Effect] = "lossy"
    after: ClassVar[tuple[str, ...]] = ("unpack",)

    file: Path | None = None
    activations: Activations = "float32"

    def rewrite(self, model: ir.Model, context: Context) -> None:
        """Store as codes what is the file's; say why anything else stays.

        Raises:
            InputError: no file is given, or it cannot be read.
            MissingDependencyError: the package ``gguf`` is not installed.
        """
        coded_tensors = self._coded_tensors()
        rows, idle_names = _rows(coded_tensors), set(coded_tensors)
        tied = tied_lookups(model.graph)
        for node in linear_nodes(model.graph):
            weight = weight_of(node, 1)
            assert weight is not None and weight.const_value is not None
            match = _match_rows(np.ascontiguousarray(expression_of(weight.const_value).numpy().T), coded_tensors, rows)
            if match is None:
                context.ledger.skipped(node, NOT_OF_FILE())
            else:
                idle_names -= match.names
                if isinstance(match.tensor.coding, EntryCoding):
                    kept_entries = KeptEntries(match.tensor, match.rows)
                    self._keep_entries(model.graph, node, weight, kept_entries, context, is_tied=node in tied)
                    continue
                # onnxruntime would hold a tied matrix twice, packed for its product and as it is for the lookup
                standard = node not in tied or context.target == "portable"
                on_gpu = context.target == "ort-cuda"
                kept_codes = KeptCodes(match.tensor, match.rows, standard=standard, as_zero_points=on_gpu)
                if node in tied and kept_codes.coding.column_order is not None:
                    context.ledger.skipped(node, NO_LOOKUP(kind=kept_codes.source.kind))
                    continue
                self._keep_matrix(model.graph, node, weight, kept_codes, context.ledger, tied.get(node, ()))
        for node in token_lookups(model.graph):
            idle_names -= self._keep_table(model.graph, node, coded_tensors, rows, context)
        for name in sorted(idle_names):
            context.ledger.skipped(name, NOT_USED())

    def _coded_tensors(self) -> dict[str, CodedTensor]:
        if self.file is None or not self.file.exists():
            raise InputError(
                "the step keep_codes needs the GGUF file or the folder that the model was exported from",
                file=self.file,
                remedy="give it: --set keep_codes.file=model.gguf",
            )
        if self.file.is_dir():
            return coded_matrices(self.file)
        coded_tensors: dict[str, CodedTensor] = {}
        for name, tensor in open_gguf(self.file).tensors.items():
            if has_codes(tensor):
                coded_tensors[name] = GgmlCodes(tensor)  # type: ignore[arg-type]
            elif has_entries(tensor):
                coded_tensors[name] = GgmlEntries(tensor)  # type: ignore[arg-type]
        return coded_tensors

    def _keep_entries(
        self,
        graph: ir.Graph,
        node: ir.Node,
        weight: ir.Value,
        kept_entries: KeptEntries,
        context: Context,
        *,
        is_tied: bool,
    ) -> None:
        """Let ``node`` multiply by codes of vectors where kernels know them."""
        book, kind = kept_entries.codebook, kept_entries.source.kind
        if is_tied or context.target == "ort-cuda":
            context.ledger.skipped(node, NO_LOOKUP(kind=kind) if is_tied else ON_CPUS(kind=kind))
            return
        parts = {
            part: new_weight(graph, f"{weight.name}.{part}", WeightTensor(Part(kept_entries, part)))
            for part in kept_entries.parts
        }
        tables = {port: shared_constant(graph, f"{book.name}.{port}", array) for port, array in book.operands.items()}
        rows, columns = kept_entries.matrix_shape
        reader = DEQUANTIZE_CODEBOOK.node(
            {**parts, **tables}, book.attributes(rows, columns), name=f"{node.name}.dequantize"
        )
        set_type(reader.outputs[0], f"{weight.name}.dequantized", weight.dtype, [rows, columns])
        graph.insert_before(node, reader)
        node.replace_input_with(1, reader.outputs[0])
        fact = CODES_KEPT(weight=weight.name, kind=kind, format=book.name, group=book.group)
        context.ledger.changed(reader, fact, [weight])
        drop(graph, weight)

    def _keep_matrix(
        self,
        graph: ir.Graph,
        node: ir.Node,
        weight: ir.Value,
        kept_codes: KeptCodes,
        ledger: Ledger,
        tied: Sequence[ir.Node],
    ) -> None:
        assert weight.const_value is not None
        reader = _reader(graph, node, weight, kept_codes)
        set_type(reader.outputs[0], f"{weight.name}.dequantized", weight.dtype, weight.const_value.shape.numpy())
        graph.insert_before(node, reader)
        node.replace_input_with(1, reader.outputs[0])
        if kept_codes.coding.column_order is not None:
            _reorder_input(graph, node, weight, kept_codes.coding.column_order, ledger)
        ledger.changed(reader, _fact_of(weight, kept_codes), [weight])
        for lookup in tied:
            look_up_columns(graph, lookup, reader, weight, ledger)
        drop(graph, weight)
        if not kept_codes.is_standard and self.activations != "float32":
            rounding = {"activations": self.activations, "group": kept_codes.group, "clip": 1.0}
            round_input(graph, node, rounding, ledger)

    def _look_up_columns(
        self, graph: ir.Graph, node: ir.Node, table: ir.Value, kept_codes: KeptCodes, ledger: Ledger
    ) -> None:
        """Let ``node`` look up columns of the transposed table, whose codes lie as those of a product."""
        assert table.const_value is not None
        reader = _reader(graph, node, table, kept_codes)
        rows, columns = table.const_value.shape.numpy()
        set_type(reader.outputs[0], f"{table.name}.dequantized", table.dtype, [columns, rows])
        graph.insert_before(node, reader)
        node.replace_input_with(0, columns_of(graph, reader, node))
        ledger.changed(reader, _fact_of(table, kept_codes), [node, table])
        ledger.changed(node, LOOKED_UP(part="a row", table=table.name), [node, table])
        drop(graph, table)

    def _keep_table(
        self, graph: ir.Graph, node: ir.Node, tensors: dict[str, CodedTensor], rows: _Rows, context: Context
    ) -> set[str]:
        """Look ``node`` up in codes where they allow it; return the tensors of the file that have its numbers."""
        ledger = context.ledger
        table, ids, output = weight_of(node, 0), node.inputs[1], node.outputs[0]
        assert table is not None and table.const_value is not None
        match = _match_rows(expression_of(table.const_value).numpy(), tensors, rows)
        if match is None or ids is None or ids.shape is None:
            ledger.skipped(node, NOT_OF_FILE())
            return set()
        tensor = match.tensor
        if isinstance(tensor.coding, EntryCoding) or tensor.coding is None or tensor.coding.column_order is not None:
            ledger.skipped(node, NO_LOOKUP(kind=tensor.kind))
            return match.names
        if tensor.coding.format.bits < 8 or not KeptCodes(tensor, match.rows).can_be_looked_up:
            on_gpu = context.target == "ort-cuda"
            kept_codes = KeptCodes(tensor, match.rows, standard=False, as_zero_points=on_gpu)
            self._look_up_columns(graph, node, table, kept_codes, ledger)
            return match.names
        kept_codes = KeptCodes(tensor, match.rows, looked_up=True)
        looked_up = []
        for part, part_tensor in _initializers(graph, table, kept_codes).items():
            dtype, shape = kept_codes.parts[part]
            gather = ir.node("Gather", [part_tensor, ids], {"axis": 0}, name=f"{node.name}.{part}")
            set_type(gather.outputs[0], f"{output.name}.{part}", dtype, [*ids.shape, shape[1]])
            graph.insert_before(node, gather)
            ledger.changed(gather, LOOKED_UP(part=part, table=table.name), [node, table])
            looked_up.append(gather.outputs[0])
            if dtype == ir.DataType.FLOAT16:
                wide = ir.node("Cast", [looked_up.pop()], {"to": ir.DataType.FLOAT}, name=f"{node.name}.{part}.wide")
                set_type(wide.outputs[0], f"{output.name}.{part}.wide", ir.DataType.FLOAT, [*ids.shape, shape[1]])
                graph.insert_before(node, wide)
                ledger.changed(wide, LOOKED_UP(part=part, table=table.name), [node, table])
                looked_up.append(wide.outputs[0])
        attributes = {"axis": len(ids.shape), "block_size": kept_codes.group}
        reader = ir.node("DequantizeLinear", looked_up, attributes, name=f"{node.name}.dequantize")
        set_type(reader.outputs[0], output.name, table.dtype, [*ids.shape, tensor.shape[1]])
        replace(node, reader)
        ledger.changed(reader, _fact_of(table, kept_codes), [node, table])
        return match.names


def _reader(graph: ir.Graph, node: ir.Node, weight: ir.Value, kept_codes: KeptCodes) -> ir.Node:
    """Return the node that makes the matrix of ``weight`` of its codes, to be put in front of ``node``."""
    initializers = _initializers(graph, weight, kept_codes)
    if kept_codes.is_standard:
        attributes = {"axis": 0, "block_size": kept_codes.group}
        return ir.node("DequantizeLinear", [*initializers.values()], attributes, name=f"{node.name}.dequantize")
    points, minimums = initializers.get("zero_points"), initializers.get("minimums")
    codes, scales, is_minimum = initializers["codes"], initializers["scales"], minimums is not None
    return dequantize(
        graph, node, codes, scales, kept_codes.format, points or minimums, kept_codes.group, minimums=is_minimum
    )


def _fact_of(weight: ir.Value, kept_codes: KeptCodes) -> Fact:
    return CODES_KEPT(
        weight=weight.name,
        kind=kept_codes.source.kind,
        format=kept_codes.format.name,
        group=kept_codes.group,
        in_order=kept_codes.coding.column_order is not None or None,
    )


def _reorder_input(graph: ir.Graph, node: ir.Node, weight: ir.Value, order: Array, ledger: Ledger) -> None:
    """Let ``node`` read the columns of its input in another order, from one Gather for all with the same order."""
    x = node.inputs[0]
    assert x is not None
    digest = hashlib.blake2b(order.tobytes(), digest_size=8).hexdigest()
    indices = shared_constant(graph, f"order.{digest}", order)
    gather = next((use.node for use in x.uses() if use.node.op_type == "Gather" and indices in use.node.inputs), None)
    if gather is None:
        gather = ir.node("Gather", [x, indices], {"axis": -1}, name=f"{x.name}.order.{digest}")
        output = gather.outputs[0]
        output.name, output.type, output.shape = f"{gather.name}.output", x.type, x.shape
        graph.insert_before(node, gather)
        ledger.changed(gather, INPUT_ORDER(input=x.name, weight=weight.name), [node])
    node.replace_input_with(0, gather.outputs[0])


def _initializers(graph: ir.Graph, weight: ir.Value, kept_codes: KeptCodes) -> dict[str, ir.Value]:
    return {
        part: new_weight(graph, f"{weight.name}.{part}", WeightTensor(Part(kept_codes, part)))
        for part in kept_codes.parts
    }


def _rows(tensors: dict[str, CodedTensor]) -> _Rows:
    matches: _Rows = {}
    for name, tensor in tensors.items():
        row = 0
        for region in blocks_of(tensor.shape, 1):
            for digest in _digests(tensor.evaluate(region)):
                matches.setdefault(digest, {})[name] = row
                row += 1
    return matches


def _match_rows(numbers: Array, tensors: dict[str, CodedTensor], rows: _Rows) -> _Match | None:
    """Return where ``numbers`` [rows, width] lie, if each of them is a row of one tensor.

    Rows of several tensors, such as gates and ups of an expert, are those of one where all have one coding.
    """
    positions = []
    for digest in _digests(numbers):
        indices = rows.get(digest)
        if indices is None:
            return None
        positions.append(indices)
    if not positions:
        return None
    names = set[str]().union(*positions)
    common_names = set.intersection(*map(set, positions))
    if common_names:
        name = min(common_names)
        return _Match(tensors[name], np.array([indices[name] for indices in positions], np.int64), names)
    stackings = [{stacking_of(tensors[name]): name for name in sorted(indices, reverse=True)} for indices in positions]
    common = set.intersection(*map(set, stackings)) - {None}
    if not common:
        return None
    stacking = min(common, key=str)
    owners = [by_stacking[stacking] for by_stacking in stackings]
    order = list(dict.fromkeys(owners))
    firsts = dict(zip(order, np.cumsum([0, *(tensors[name].shape[0] for name in order[:-1])]), strict=True))
    row_indices = [firsts[name] + indices[name] for name, indices in zip(owners, positions, strict=True)]
    return _Match(StackedCodes(tuple(tensors[name] for name in order)), np.array(row_indices, np.int64), names)


def _digests(numbers: Array) -> Iterator[bytes]:
    # -0 is 0; all else that is equal has the same bytes
    for row in np.ascontiguousarray(numbers, np.float32) + np.float32(0):
        yield hashlib.blake2b(row.data, digest_size=16).digest()
