"""The phases of a compilation, and what holds in each: stated here once, checked behind every pass of a compilation.

A model may come in with a node that breaks an invariant, such as an operator of another vendor or codes that another
tool wrote. That node may stay. A pass must not add another one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

import onnx

from graphopt.analysis.structure.convolutions import is_of_convolution
from graphopt.analysis.structure.decoded_weights import is_decoded_weight
from graphopt.analysis.structure.product_codes import dequantize_of, feeds_lookups, is_dequantize
from graphopt.analysis.structure.products import reads_packed
from graphopt.errors import VerificationError
from graphopt.graph.onnx_file import NEWEST_OPSET
from graphopt.runtime_ops import DOMAIN, calls_of
from graphopt.runtime_ops.round_activations.spec.op import ROUND_ACTIVATIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    import onnx_ir as ir

Phase = Literal["importing", "lift", "algebra", "codes", "cache", "interface", "lower"]
PHASES: tuple[Phase, ...] = get_args(Phase)
"""The phases of a compilation, in order."""

BEFORE_LOWER = PHASES[:-1]

CANONICAL_OPSETS = range(23, NEWEST_OPSET + 1)
"""From the first opset with ``Attention``, ``RMSNormalization`` and ``RotaryEmbedding`` to the newest that runs."""


@dataclass(frozen=True)
class Invariant:
    """What holds behind each pass of some phases.

    Attributes:
        name: what errors call it.
        says: what holds, in a sentence.
        phases: where.
        broken_by: yields the nodes that break it; ``None`` stands for the model as a whole.
    """

    name: str
    says: str
    phases: Collection[Phase]
    broken_by: Callable[[ir.Model], Iterator[ir.Node | None]]


@dataclass
class Breaches:
    """What breaks the invariants of a phase, at one moment; :func:`confirm` lets it stay.

    Attributes:
        in_graph: each invariant that is broken, with the node that breaks it.
        in_bodies: the same for nodes inside functions, which a pass may inline: invariant, domain and operator.
    """

    in_graph: list[tuple[Invariant, ir.Node | None]] = field(default_factory=list)
    in_bodies: set[tuple[str, str, str]] = field(default_factory=set)

    def new_since(self, before: Breaches) -> list[tuple[Invariant, ir.Node | None]]:
        """Return what was not there before. A node is known by itself, or by its operator and what it makes."""
        nodes = {(rule.name, node) for rule, node in before.in_graph}
        names = {(rule.name, _identity(node)) for rule, node in before.in_graph if node is not None}
        return [
            (rule, node)
            for rule, node in self.in_graph
            if (rule.name, node) not in nodes
            and (node is None or (rule.name, _identity(node)) not in names)
            and (node is None or (rule.name, node.domain, node.op_type) not in before.in_bodies)
        ]


def breaches(model: ir.Model, phase: Phase) -> Breaches:
    """Return what breaks the invariants of ``phase`` in ``model``."""
    output = Breaches()
    for rule in INVARIANTS:
        if phase in rule.phases:
            output.in_graph += [(rule, node) for node in rule.broken_by(model)]
    if output.in_graph:
        inside = {node for body in model.functions.values() for node in body.all_nodes()}
        output.in_bodies = {
            (rule.name, node.domain, node.op_type)
            for rule, node in output.in_graph
            if node is not None and node in inside
        }
    return output


def confirm(model: ir.Model, name: str, phase: Phase, before: Breaches) -> None:
    """Confirm that the pass called ``name`` kept the invariants of its phase.

    Args:
        model: the model behind the pass.
        name: of the pass.
        phase: of the pass.
        before: what :func:`breaches` found in front of it.

    Raises:
        VerificationError: it did not; names the pass, the invariant and the first node that breaks it.
    """
    for rule, node in breaches(model, phase).new_since(before):
        subject = "the model" if node is None else f"{node.domain or 'ONNX'}::{node.op_type}"
        raise VerificationError(
            f"the pass {name} broke the invariant {rule.name!r} of the phase {phase}, which {subject} does not keep: "
            f"{rule.says}",
            node=None if node is None else node.name,
            remedy="leave the pass out of the recipe, and report this with the model",
        )


def _identity(node: ir.Node) -> tuple[str, ...]:
    return (node.domain, node.op_type, *(value.name or "" for value in node.outputs))


def _calls(model: ir.Model) -> Iterator[ir.Node]:
    """Yield the nodes of the graph and of bodies that are of no standard operator."""
    yield from calls_of(model.graph)
    for body in model.functions.values():
        yield from calls_of(body)


def _other_opset(model: ir.Model) -> Iterator[None]:
    if model.opset_imports.get("") not in CANONICAL_OPSETS:
        yield None


def _not_in_opset(model: ir.Model) -> Iterator[ir.Node]:
    is_known: dict[str, bool] = {}
    opset = model.opset_imports.get("", 0)
    for node in model.graph.all_nodes():
        if not node.domain:
            if node.op_type not in is_known:
                is_known[node.op_type] = onnx.defs.has(node.op_type, max_inclusive_version=opset, domain="")
            if not is_known[node.op_type]:
                yield node


def _without_body(model: ir.Model) -> Iterator[ir.Node]:
    return (node for node in _calls(model) if node.domain == DOMAIN and node.op_identifier() not in model.functions)


def _foreign(model: ir.Model) -> Iterator[ir.Node]:
    return (node for node in _calls(model) if node.domain != DOMAIN and node.op_identifier() not in model.functions)


def _packed_nodes(model: ir.Model) -> Iterator[ir.Node]:
    return (node for node in model.graph.all_nodes() if reads_packed(node))


def _codes_elsewhere(model: ir.Model) -> Iterator[ir.Node]:
    for node in model.graph.all_nodes():
        if is_dequantize(node) and not (_is_looked_up(node) or is_of_convolution(node) or is_decoded_weight(node)):
            output = node.outputs[0]
            if output.is_graph_output() or not all(
                feeds_lookups(use.node) or (use.idx == 1 and dequantize_of(use.node) is node) for use in output.uses()
            ):
                yield node


def _is_looked_up(node: ir.Node) -> bool:
    codes = node.inputs[0]
    producer = None if codes is None else codes.producer()
    return not node.domain and producer is not None and not producer.domain and producer.op_type == "Gather"


def _rounded_elsewhere(model: ir.Model) -> Iterator[ir.Node]:
    for node in model.graph.all_nodes():
        if (node.domain, node.op_type) == (DOMAIN, ROUND_ACTIVATIONS.name) and not _feeds_only(node, 0):
            yield node


def _feeds_only(node: ir.Node, side: int) -> bool:
    """Return whether products with codes alone read what ``node`` makes, as their input ``side``."""
    output = node.outputs[0]
    return not output.is_graph_output() and all(
        use.idx == side and dequantize_of(use.node) is not None for use in output.uses()
    )


def _ports_not_stated(model: ir.Model) -> Iterator[ir.Node | None]:
    for value in (*model.graph.inputs, *model.graph.outputs):
        if not value.name or value.type is None or value.shape is None:
            yield value.producer()


INVARIANTS = (
    Invariant(
        "canonical opset",
        f"from the phase lift on, a model of opset {CANONICAL_OPSETS[0]} to {CANONICAL_OPSETS[-1]} stays one",
        PHASES,
        _other_opset,
    ),
    Invariant("standard operators", "a node of ONNX's own domain is in the model's opset", PHASES, _not_in_opset),
    Invariant(
        "bodies travel along",
        f"each node of {DOMAIN} has its body of standard operators among the functions of the model",
        PHASES,
        _without_body,
    ),
    Invariant(
        "no foreign operators",
        "only the phase lower may bring in operators that are neither standard nor functions of the model",
        BEFORE_LOWER,
        _foreign,
    ),
    Invariant(
        "ports are stated",
        "from the phase interface on, each input and output of the graph has a name, a type and a shape",
        ("interface", "lower"),
        _ports_not_stated,
    ),
    Invariant("no packed codes", "codes are packed in the phase lower only", BEFORE_LOWER, _packed_nodes),
    Invariant(
        "codes are logical",
        "before the phase lower, Dequantize and DequantizeLinear make the right side of a MatMul, a matrix whose "
        "columns Gather looks up, rows that Gather looked up, weights or biases of Conv, weights of recurrences, "
        "ConvTranspose and Gemm, or what was encoded before",
        BEFORE_LOWER,
        _codes_elsewhere,
    ),
    Invariant(
        "roundings serve products",
        "before the phase lower, RoundActivations makes the left side of a MatMul with codes",
        BEFORE_LOWER,
        _rounded_elsewhere,
    ),
)
"""What each phase keeps. That nothing logical is left behind the step ``lower`` is stated by that step itself."""
