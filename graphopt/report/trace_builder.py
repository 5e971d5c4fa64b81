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
from graphopt.analysis.structure.roles import roles_of
from graphopt.analysis.structure.token_cost import attention_cost, constants_of, token_cost
from graphopt.artifact.artifact import MODEL
from graphopt.artifact.manifest import MANIFEST, Manifest, read_manifest
from graphopt.errors import InputError
from graphopt.graph import provenance
from graphopt.graph.onnx_file import load
from graphopt.ort.session import native_operators
from graphopt.report.description import is_here, stage_of, weights_of
from graphopt.report.trace import Fold, Left, Measure, Node, Repeat, Trace
from graphopt.runtime_ops import DECODING, DOMAIN, Cost, signature_of
from graphopt.runtime_ops.schema import attributes_of

if TYPE_CHECKING:
    from pathlib import Path

    from graphopt.graph.diagnostics import PassReport

OPERATIONS, BYTES = "operations/token", "bytes/token"
"""Metrics of nodes."""

FUSED = "MatMulNBits"
EXPERTS = ("gate_proj", "up_proj", "gate_up_proj", "down_proj")


def trace(path: Path, context: int = 1024) -> Trace:
    """Open a model and say what it consists of, and how it came to be.

    Args:
        path: an artifact, or an .onnx file, of graphopt or not.
        context: tokens before the one that figures per token are about.

    Raises:
        InputError: there is no model, or it cannot be read.
    """
    return trace_of(*opened(path, weights=False), str(path), context)


def opened(path: Path, *, weights: bool = True) -> tuple[ir.Model, Manifest | None]:
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
        self.folded: Folding = fold(self.graph)
        self.constant = constant_nodes(self.graph)
        self.roles = roles_of(self.graph, self.folded)
        self.layers = self.folded.layer_of()
        self.mixers = {mixer.node: mixer for mixer in mixers(self.graph)}
        self.weights = [value for value in self.graph.initializers.values() if self._kept(value)]
        self.skips = _skips([] if manifest is None else manifest.passes)
        self.kernels = native_operators() if any(node.domain == DOMAIN for node in self.graph) else frozenset[str]()

    def trace(self, name: str) -> Trace:
        """Put it all together."""
        folds, kinds = self._folds()
        number = {value: place for place, value in enumerate(self.weights)}
        places = {node: place for nodes in self._layer_nodes().values() for place, node in enumerate(nodes)}
        made = Trace(model=name, context=self.context, folds=folds, weights=weights_of(self.weights))
        made.stages = (
            [] if self.manifest is None else [stage_of(report, self.manifest) for report in self.manifest.passes]
        )
        made.repeats = _runs(repeats(kinds), kinds)
        shares = self._shares()
        listed = {node: place for place, node in enumerate(self.graph)}
        for node in self.graph:
            layer = self.layers.get(node)
            read = [] if node in self.constant else constants_of(node, self.constant)
            passes, left = self._coverage([node, *self._makers(node), *read])
            made.nodes.append(
                Node(
                    name=node.name or "",
                    operator=f"{node.domain}::{node.op_type}" if node.domain else node.op_type,
                    role=self.roles[node],
                    layer=layer,
                    fold=None if layer is None else kinds[layer],
                    place=places.get(node),
                    reads=list(dict.fromkeys(listed[m] for v in inputs_of(node) if (m := v.producer()) in listed)),
                    weights=[number[value] for value in read if value in number],
                    computes=self._computes(node) if read or node in self.mixers else None,
                    runner=self._runner(node),
                    passes=passes,
                    left=left,
                )
            )
            mixer = self.mixers.get(node)
            cost = token_cost(node, self.constant, shares.get(node, 1.0)) if read else None
            cost = cost if mixer is None else attention_cost(mixer, self.context)
            if cost is not None and node not in self.constant:
                made.measures += _measures(node.name or "", cost)
        if self.manifest is None:
            made.notes.append("there is no manifest, so the passes that ran are not known")
        if not all(map(is_here, self.weights)):
            made.notes.append("the file of weights is missing; nothing that is shown here needs it")
        if not self.folded.layers():
            made.notes.append("no repeated layers were found")
        return made

    @staticmethod
    def _kept(value: ir.Value) -> bool:
        tensor = value.const_value
        if tensor is None or not tensor.size:
            return False
        return is_weight(value, tensor) or reader_of(value, DECODING) is not None or tensor.nbytes > _SMALL

    def _layer_nodes(self) -> dict[int, list[ir.Node]]:
        return {
            number: [node for segment in layer for node in self.folded.order[segment]]
            for number, layer in enumerate(self.folded.layers())
        }

    def _folds(self) -> tuple[list[Fold], list[int]]:
        """Return the folds, and the fold of each layer."""
        found: dict[tuple[int, ...], int] = {}
        stored: dict[int, list[tuple[int, object]]] = defaultdict(list)
        kinds = []
        for number, layer in enumerate(self.folded.layers()):
            kind = found.setdefault(tuple(self.folded.structures[each] for each in layer), len(found))
            stored[kind].append((number, tuple(self.folded.parameters[each] for each in layer)))
            kinds.append(kind)
        folds = []
        for kind in range(len(found)):
            usual = Counter(each for _, each in stored[kind]).most_common(1)[0][0]
            exceptions = [number for number, each in stored[kind] if each != usual]
            folds.append(Fold(layers=[number for number, _ in stored[kind]], exceptions=exceptions))
        return folds, kinds

    def _shares(self) -> dict[ir.Node, float]:
        """Return which share of the tokens passes each product over experts: those chosen, of all."""
        found: dict[ir.Node, float] = {}
        for router in (node for node, role in self.roles.items() if role == "router"):
            matrix, segment = matrix_of(router, self.constant), self.folded.cuts.of.get(router)
            nodes = [node for node, number in self.folded.cuts.of.items() if number == segment]
            chosen = [_count(node) for node in nodes if node.op_type == "TopK"]
            known = [each for each in chosen if each is not None]
            products = [n for n in nodes if self.roles[n] in EXPERTS and matrix_of(n, self.constant) is not None]
            counts = Counter(self.roles[node] for node in products)
            if matrix is not None and known:
                of = matrix[1]
                found |= {n: known[0] / of for n in products if of and counts[self.roles[n]] % of == 0}
        return found

    def _computes(self, node: ir.Node) -> str | None:
        signature = signature_of(node)
        if node in self.mixers:
            storage = node.attributes.get("storage")
            key = self.mixers[node].key
            return str(storage.value) if storage is not None else None if key is None else _type(key.dtype)
        stated = None if signature is None else signature.precision(attributes_of(node))
        if stated is not None:
            return stated
        decoded = node.inputs[1].producer() if len(node.inputs) > 1 and node.inputs[1] is not None else None
        precision = None if self.manifest is None else self.manifest.precision
        if decoded is not None and decoded.op_type == "DequantizeLinear" and precision is not None:
            read = {each.activations for each in precision.products if each.operator == FUSED}
            if len(read) == 1:
                return read.pop()
        data = node.inputs[0] if node.inputs else None
        kinds = [v.dtype for v in (data, *node.outputs) if v and v.dtype and v.dtype.is_floating_point()]
        return _type(kinds[0]) if kinds else None

    def _runner(self, node: ir.Node) -> str:
        if node.domain != DOMAIN:
            return "onnxruntime"
        return "kernel" if node.op_type in self.kernels else "body"

    def _makers(self, node: ir.Node) -> list[ir.Node]:
        """Return the nodes that make a constant of stored codes for ``node``."""
        found: list[ir.Node] = []
        waiting = [] if node in self.constant else [value.producer() for value in node.inputs if value is not None]
        while waiting:
            each = waiting.pop()
            if each is not None and each in self.constant and each not in found:
                found.append(each)
                waiting += [value.producer() for value in each.inputs if value is not None]
        return found

    def _coverage(self, items: list[ir.Node | ir.Value]) -> tuple[list[str], list[Left]]:
        """Return the passes that touched a node or its weights, and those that left it alone, with their reasons."""
        steps = [step for item in items for step in provenance.steps(item)]
        names = {item.name for item in items}
        names |= {value.name for item in items if isinstance(item, ir.Node) for value in item.outputs}
        names |= {name for step in steps for name in (step.made, *step.sources)}
        left = [each for name in names for each in self.skips.get(name or "", [])]
        touched = {step.pass_name for step in steps}
        unique = {(each.by, str(each.why)): each for each in left}
        return sorted(touched, key=self._turn), [unique[key] for key in sorted(unique)]

    def _turn(self, name: str) -> tuple[int, str]:
        ran = [] if self.manifest is None else [report.name for report in self.manifest.passes]
        return (ran.index(name) if name in ran else len(ran), name)


_SMALL = 1024
"""Bytes from which on a constant that is no weight is listed too."""


def _skips(reports: list[PassReport]) -> dict[str, list[Left]]:
    found: dict[str, list[Left]] = defaultdict(list)
    for report in reports:
        for skip in report.skips:
            for name in {skip.where, skip.node} - {None}:
                found[str(name)].append(Left(by=report.name, why=skip.reason))
    return found


def _count(node: ir.Node) -> int | None:
    """Return how many a TopK takes, where that is a constant."""
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
    found = ((OPERATIONS, cost.operations, "operations"), (BYTES, cost.bytes, "bytes"))
    return [Measure(subject=name, metric=metric, value=value, unit=unit) for metric, value, unit in found]
