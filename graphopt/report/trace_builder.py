"""Makes the trace of a model: of any ONNX file; of an artifact of graphopt with what its manifest says."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.analysis.structure.cost import is_weight, reader_of
from graphopt.analysis.structure.folding import Folding, fold, mixers
from graphopt.analysis.structure.folding.labels import matrix_of
from graphopt.analysis.structure.folding.repeats import Part, repeats
from graphopt.analysis.structure.folding.repeats import Repeat as Run
from graphopt.analysis.structure.folding.trunk import constant_nodes, inputs_of
from graphopt.analysis.structure.products import expert_count
from graphopt.analysis.structure.roles import roles_of
from graphopt.analysis.structure.token_cost import attention_cost, constants_of, token_cost
from graphopt.artifact.artifact import MODEL
from graphopt.artifact.manifest import MANIFEST, Manifest, read_manifest
from graphopt.errors import InputError
from graphopt.graph import provenance
from graphopt.graph.onnx_file import load
from graphopt.ort.session import native_operators
from graphopt.report.description import is_here, stage_of, weights_of
from graphopt.report.trace import Fold, Measure, Node, Repeat, SkipReason, Trace
from graphopt.runtime_ops import DECODING, DOMAIN, Cost, signature_of
from graphopt.runtime_ops.schema import attributes_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from graphopt.graph.diagnostics import PassReport

OPERATIONS, BYTES = "operations/token", "bytes/token"
"""Metrics of nodes."""

FUSED_PRODUCT = "MatMulNBits"
EXPERTS = ("gate_proj", "up_proj", "gate_up_proj", "down_proj")


def trace(path: Path, context: int = 1024) -> Trace:
    """Open a model and say what it consists of, and how it came to be.

    Args:
        path: an artifact, or an .onnx file, of graphopt or not.
        context: tokens before the one that figures per token are about.

    Raises:
        InputError: there is no model, or it cannot be read.
    """
    return trace_of(*open_model(path, weights=False), str(path), context)


def open_model(path: Path, *, weights: bool = True) -> tuple[ir.Model, Manifest | None]:
    """Open a model, and read its manifest where there is one.

    Args:
        path: an artifact, or an .onnx file.
        weights: whether its weights must be there, too; else no number of them can be read.

    Raises:
        InputError: there is no model, or it cannot be read.
    """
    file = path / MODEL if path.is_dir() else path
    if not file.is_file():
        raise InputError("there is no ONNX model here", file=path, remedy=f"give a folder with {MODEL}, or a file")
    manifest = read_manifest(path) if path.is_dir() and (path / MANIFEST).is_file() else None
    return load(file, weights=weights), manifest


def trace_of(model: ir.Model, manifest: Manifest | None, name: str, context: int = 1024) -> Trace:
    """Say what a model consists of, and how it came to be; see :func:`trace`."""
    return _Tracer(model, manifest, context).trace(name)


class _Tracer:
    def __init__(self, model: ir.Model, manifest: Manifest | None, context: int) -> None:
        self.graph, self.manifest, self.context = model.graph, manifest, context
        self.folding: Folding = fold(self.graph)
        self.constant = constant_nodes(self.graph)
        self.roles = roles_of(self.graph, self.folding)
        self.layers = self.folding.layer_of()
        self.mixers = {mixer.node: mixer for mixer in mixers(self.graph)}
        self.weights = [value for value in self.graph.initializers.values() if self._is_listed(value)]
        self.weight_numbers = {value: number for number, value in enumerate(self.weights)}
        self.numbers: dict[ir.Node | None, int] = {node: number for number, node in enumerate(self.graph)}
        self.positions = self._positions()
        self.skips = _skips([] if manifest is None else manifest.passes)
        self.kernels = native_operators() if any(node.domain == DOMAIN for node in self.graph) else frozenset[str]()

    def trace(self, name: str) -> Trace:
        """Put it all together."""
        folds, kinds = self._folds()
        result = Trace(model=name, context=self.context, folds=folds, weights=weights_of(self.weights))
        if self.manifest is not None:
            result.stages = [stage_of(report, self.manifest) for report in self.manifest.passes]
        result.repeats = _runs(repeats(kinds), kinds)
        shares = self._shares()
        for node in self.graph:
            constants = [] if node in self.constant else constants_of(node, self.constant)
            result.nodes.append(self._node(node, constants, kinds))
            mixer = self.mixers.get(node)
            cost = token_cost(node, self.constant, shares.get(node, 1.0)) if constants else None
            cost = cost if mixer is None else attention_cost(mixer, self.context)
            if cost is not None and node not in self.constant:
                result.measures += _measures(node.name or "", cost)
        result.notes += self._notes()
        return result

    def _node(self, node: ir.Node, constants: list[ir.Value], kinds: list[int]) -> Node:
        """Return what a trace says of a node that reads ``constants``; ``kinds`` are the folds of the layers."""
        layer = self.layers.get(node)
        passes, skips = self._coverage([node, *self._makers(node), *constants])
        reads = (value.producer() for value in inputs_of(node))
        return Node(
            name=node.name or "",
            operator=f"{node.domain}::{node.op_type}" if node.domain else node.op_type,
            role=self.roles[node],
            layer=layer,
            fold=None if layer is None else kinds[layer],
            place=self.positions.get(node),
            reads=list(dict.fromkeys(self.numbers[maker] for maker in reads if maker in self.numbers)),
            weights=[self.weight_numbers[value] for value in constants if value in self.weight_numbers],
            computes=self._computes(node) if constants or node in self.mixers else None,
            runner=self._runner(node),
            passes=passes,
            left=skips,
        )

    def _notes(self) -> Iterator[str]:
        if self.manifest is None:
            yield "there is no manifest, so the passes that ran are not known"
        if not all(map(is_here, self.weights)):
            yield "the file of weights is missing; nothing that is shown here needs it"
        if not self.folding.layers():
            yield "no repeated layers were found"

    @staticmethod
    def _is_listed(value: ir.Value) -> bool:
        tensor = value.const_value
        if tensor is None or not tensor.size:
            return False
        return is_weight(value, tensor) or reader_of(value, DECODING) is not None or tensor.nbytes > _SMALL

    def _positions(self) -> dict[ir.Node, int]:
        """Return where each node of a layer stands in the order that all layers of its fold have in common."""
        layers = ([node for part in layer for node in self.folding.order[part]] for layer in self.folding.layers())
        return {node: index for nodes in layers for index, node in enumerate(nodes)}

    def _folds(self) -> tuple[list[Fold], list[int]]:
        """Return the folds, and the fold of each layer."""
        kinds_of: dict[tuple[int, ...], int] = {}
        formats: dict[int, list[tuple[int, object]]] = defaultdict(list)
        kinds = []
        for number, layer in enumerate(self.folding.layers()):
            kind = kinds_of.setdefault(tuple(self.folding.structures[segment] for segment in layer), len(kinds_of))
            formats[kind].append((number, tuple(self.folding.parameters[segment] for segment in layer)))
            kinds.append(kind)
        folds = []
        for kind in range(len(kinds_of)):
            majority = Counter(segment for _, segment in formats[kind]).most_common(1)[0][0]
            exceptions = [number for number, segment in formats[kind] if segment != majority]
            folds.append(Fold(layers=[number for number, _ in formats[kind]], exceptions=exceptions))
        return folds, kinds

    def _shares(self) -> dict[ir.Node, float]:
        """Return which share of the tokens passes each product over experts: those chosen, of all."""
        shares: dict[ir.Node, float] = {}
        segment_of = self.folding.cuts.segment_of
        for router in (node for node, role in self.roles.items() if role == "router"):
            matrix, segment = matrix_of(router, self.constant), segment_of.get(router)
            nodes = [node for node, number in segment_of.items() if number == segment]
            chosen_count = next((count for node in nodes if (count := _count(node)) is not None), None)
            if matrix is None or chosen_count is None or not matrix[1]:
                continue
            products = [n for n in nodes if self.roles[n] in EXPERTS and matrix_of(n, self.constant) is not None]
            counts: Counter[str] = Counter()
            for node in products:
                counts[self.roles[node]] += expert_count(node) or 1
            shares |= {n: chosen_count / matrix[1] for n in products if counts[self.roles[n]] % matrix[1] == 0}
        return shares

    def _computes(self, node: ir.Node) -> str | None:
        """Return what a node rounds its inputs to, or the type that it computes in; ``None`` where nothing tells."""
        if node in self.mixers:
            storage, key = node.attributes.get("storage"), self.mixers[node].key
            return str(storage.value) if storage is not None else None if key is None else _type(key.dtype)
        signature = signature_of(node)
        precision = None if signature is None else signature.precision(attributes_of(node))
        if precision is not None:
            return precision
        activations = self._fused_activations(node)
        if len(activations) == 1:
            return activations.pop()
        values = (*node.inputs[:1], *node.outputs)
        return next((_type(v.dtype) for v in values if v and v.dtype and v.dtype.is_floating_point()), None)

    def _fused_activations(self, node: ir.Node) -> set[str]:
        """Return what onnxruntime rounds the inputs of products to that read ``DequantizeLinear``, as this one does."""
        matrix = node.inputs[1] if len(node.inputs) > 1 else None
        decoder = None if matrix is None else matrix.producer()
        if decoder is None or decoder.op_type != "DequantizeLinear" or self.manifest is None:
            return set()
        products = () if self.manifest.precision is None else self.manifest.precision.products
        return {product.activations for product in products if product.operator == FUSED_PRODUCT}

    def _runner(self, node: ir.Node) -> str:
        if node.domain != DOMAIN:
            return "onnxruntime"
        return "kernel" if node.op_type in self.kernels else "body"

    def _makers(self, node: ir.Node) -> list[ir.Node]:
        """Return the nodes that make a constant of stored codes for ``node``."""
        makers: list[ir.Node] = []
        waiting = [] if node in self.constant else [value.producer() for value in node.inputs if value is not None]
        while waiting:
            producer = waiting.pop()
            if producer is not None and producer in self.constant and producer not in makers:
                makers.append(producer)
                waiting += [value.producer() for value in producer.inputs if value is not None]
        return makers

    def _coverage(self, items: list[ir.Node | ir.Value]) -> tuple[list[str], list[SkipReason]]:
        """Return the passes that touched a node or its weights, and those that left it alone, with their reasons."""
        steps = [step for item in items for step in provenance.steps(item)]
        names = {item.name for item in items}
        names |= {value.name for item in items if isinstance(item, ir.Node) for value in item.outputs}
        names |= {name for step in steps for name in (step.name, *step.sources)}
        skips = [skip for name in names for skip in self.skips.get(name or "", [])]
        names_of_passes = {step.pass_name for step in steps}
        unique = {(skip.by, str(skip.why)): skip for skip in skips}
        return sorted(names_of_passes, key=self._turn), [unique[key] for key in sorted(unique)]

    def _turn(self, name: str) -> tuple[int, str]:
        order = [] if self.manifest is None else [report.name for report in self.manifest.passes]
        return (order.index(name) if name in order else len(order), name)


_SMALL = 1024
"""Bytes from which on a constant that is no weight is listed too."""


def _skips(reports: list[PassReport]) -> dict[str, list[SkipReason]]:
    reasons: dict[str, list[SkipReason]] = defaultdict(list)
    for report in reports:
        for skip in report.skips:
            for name in {skip.where, skip.node} - {None}:
                reasons[str(name)].append(SkipReason(by=report.name, why=skip.reason))
    return reasons


def _count(node: ir.Node) -> int | None:
    """Return how many a TopK takes, where that is a constant; ``None`` for another operator."""
    if node.op_type != "TopK":
        return None
    value, data = node.inputs[1], node.inputs[0]
    tensor = None if value is None else value.const_value
    if data is None or data.dtype is None or not data.dtype.is_floating_point() or tensor is None:
        return None
    return int(tensor.numpy().reshape(-1)[0])


def _type(dtype: ir.DataType | None) -> str | None:
    return None if dtype is None else {"FLOAT": "float32", "DOUBLE": "float64"}.get(dtype.name, dtype.name.lower())


def _runs(parts: list[Part] | tuple[Part, ...], kinds: list[int]) -> list[Repeat | int]:
    return [
        Repeat(count=part.count, parts=_runs(part.unit, kinds)) if isinstance(part, Run) else kinds[part]
        for part in parts
    ]


def _measures(name: str, cost: Cost) -> list[Measure]:
    figures = ((OPERATIONS, cost.operations, "operations"), (BYTES, cost.bytes, "bytes"))
    return [Measure(subject=name, metric=metric, value=value, unit=unit) for metric, value, unit in figures]
