"""A `Scan` or a `Loop` with one state, as a step that is done for each token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.graph.diagnostics import Fact, Rule

if TYPE_CHECKING:
    from collections.abc import Iterable

STATES = Rule(
    "canonicalize.recurrence-states", "it has {states} states and {outputs} outputs of tokens, not one of each"
)
BACKWARD = Rule("canonicalize.recurrence-backward", "it goes through the tokens backward")
CAPTURES = Rule("canonicalize.recurrence-captures", "its step reads {tensor}, which is no constant")
CONDITION = Rule("canonicalize.recurrence-condition", "it may end before the last token")
INDEX = Rule("canonicalize.recurrence-index", "its step uses the number of the token for more than to take it")
HAS_SUBGRAPH = Rule("canonicalize.recurrence-nested", "its step has a graph inside ({op})")
NO_TOKENS = Rule("canonicalize.recurrence-no-tokens", "its step takes no tokens")
TRIPS = Rule("canonicalize.recurrence-trips", "that it goes through all tokens of {tensor} is not known")


@dataclass(frozen=True)
class Tokens:
    """Where a step has its tokens from.

    Attributes:
        inside: a token, in the step.
        outside: the tensor of all tokens.
        axis: of the tokens.
    """

    inside: ir.Value
    outside: ir.Value
    axis: int


@dataclass(frozen=True)
class Steps:
    """A recurrence as its node spells it.

    Attributes:
        node: the `Scan` or `Loop`.
        nodes: of a step, in order, without those that take tokens.
        state: before a step; ``new_state`` behind it.
        initial: the state before the first token; ``final`` behind the last.
        tokens: what a step takes.
        output: what a step gives; ``sequence`` that of all tokens, along ``output_axis``.
        constants: of the graph outside that steps read.
    """

    node: ir.Node
    nodes: tuple[ir.Node, ...]
    state: ir.Value
    new_state: ir.Value
    initial: ir.Value
    final: ir.Value
    tokens: tuple[Tokens, ...]
    output: ir.Value
    sequence: ir.Value
    output_axis: int
    constants: tuple[ir.Value, ...]

    @property
    def values(self) -> list[ir.Value]:
        """All values of a step, in order."""
        of_nodes = (value for node in self.nodes for value in node.outputs)
        return [self.state, *(tokens.inside for tokens in self.tokens), *of_nodes, *self.constants]


def steps_of(node: ir.Node, *, is_part: bool = False) -> Steps | Fact:
    """Return what a `Scan` or a `Loop` does for each token, or why it is not seen.

    Args:
        node: the `Scan` or `Loop`.
        is_part: whether it was cut out of a graph, and how many tokens it goes through was looked at there.
    """
    return _steps_of_scan(node) if node.op_type == "Scan" else _steps_of_loop(node, is_part=is_part)


def _steps_of_scan(node: ir.Node) -> Steps | Fact:
    body, count = node.attributes["body"].as_graph(), node.attributes["num_scan_inputs"].as_int()
    states = len(node.inputs) - count
    if states != 1 or len(body.outputs) != 2:
        return STATES(states=states, outputs=len(body.outputs) - states)
    for name in ("scan_input_directions", "scan_output_directions"):
        if any(node.attributes.get_ints(name, ())):
            return BACKWARD()
    axes = list(node.attributes.get_ints("scan_input_axes", [0] * count))
    tokens = []
    for inside, outside, axis in zip(body.inputs[1:], node.inputs[1:], axes, strict=True):
        assert outside is not None
        rank = len(outside.shape) if outside.shape is not None else 0
        tokens.append(Tokens(inside, outside, axis + rank if axis < 0 else axis))
    output_axis = next(iter(node.attributes.get_ints("scan_output_axes", [0])))
    states_and_output = (body.inputs[0], body.outputs[0], node.inputs[0], body.outputs[1])
    return _check_steps(node, list(body), states_and_output, tokens, output_axis)


def _steps_of_loop(node: ir.Node, *, is_part: bool) -> Steps | Fact:
    body = node.attributes["body"].as_graph()
    index, condition, *states = body.inputs
    if len(states) != 1 or len(body.outputs) != 3:
        return STATES(states=len(states), outputs=len(body.outputs) - 1 - len(states))
    if not _goes_on(node.inputs[1]) or not _goes_on(body.outputs[0], condition):
        return CONDITION()
    takers = [use.node for use in index.uses()]
    if any(taker.op_type != "Gather" or taker.inputs[1] is not index or taker.graph is not body for taker in takers):
        return INDEX()
    tokens = []
    for taker in takers:
        outside = taker.inputs[0]
        if outside is None or outside.graph is body or outside.shape is None:
            return INDEX()
        axis = taker.attributes.get_int("axis", 0)
        tokens.append(Tokens(taker.outputs[0], outside, axis + len(outside.shape) if axis < 0 else axis))
    for of_token in tokens:
        if not is_part and not _is_length(node.inputs[0], of_token):
            return TRIPS(tensor=of_token.outside.name)
    nodes = [inner for inner in body if inner not in takers and body.outputs[0] not in inner.outputs]
    states_and_output = (states[0], body.outputs[1], node.inputs[2], body.outputs[2])
    return _check_steps(node, nodes, states_and_output, tokens, 0)


def _check_steps(
    node: ir.Node,
    nodes: list[ir.Node],
    states_and_output: tuple[ir.Value, ir.Value, ir.Value | None, ir.Value],
    tokens: list[Tokens],
    output_axis: int,
) -> Steps | Fact:
    """Return the steps, unless they read what is neither theirs nor a constant."""
    state, new_state, initial, output = states_and_output
    values = {state, *(of_token.inside for of_token in tokens), *(value for inner in nodes for value in inner.outputs)}
    if not tokens or initial is None or new_state not in values or output not in values:
        return NO_TOKENS()
    graphs = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
    constants: dict[ir.Value, None] = {}
    for inner in nodes:
        if any(attribute.type in graphs for attribute in inner.attributes.values()):
            return HAS_SUBGRAPH(op=inner.op_type)
        for value in inner.inputs:
            if value is None or value in values:
                continue
            if value.const_value is None:
                return CAPTURES(tensor=value.name)
            constants[value] = None
    final, sequence = node.outputs
    return Steps(
        node=node,
        nodes=tuple(nodes),
        state=state,
        new_state=new_state,
        initial=initial,
        final=final,
        tokens=tuple(tokens),
        output=output,
        sequence=sequence,
        output_axis=output_axis,
        constants=tuple(constants),
    )


def _goes_on(value: ir.Value | None, before: ir.Value | None = None) -> bool:
    """Return whether a condition is true: left out, a true constant, or the one before, which was true."""
    if value is None or value is before:
        return True
    producer = value.producer()
    if producer is not None and producer.op_type == "Identity":
        return _goes_on(producer.inputs[0], before)
    constant = ir.convenience.get_const_tensor(value)
    return constant is not None and bool(constant.numpy().all())


def _is_length(count: ir.Value | None, tokens: Tokens) -> bool:
    """Return whether ``count`` is the number of tokens: the same constant, or taken of a shape."""
    shape = tokens.outside.shape
    length = None if shape is None else shape[tokens.axis]
    constant = None if count is None else ir.convenience.get_const_tensor(count)
    if constant is not None:
        return isinstance(length, int) and constant.numpy().size == 1 and int(constant.numpy().item()) == length
    dim = _dim_of(count)
    return (
        dim is not None
        and length is not None
        and dim == length
        and (isinstance(length, int) or length.value is not None)
    )


def _dim_of(value: ir.Value | None) -> int | ir.SymbolicDim | None:
    """Return the dimension that ``value`` is taken of a `Shape` as, or ``None``."""
    node = None if value is None else value.producer()
    if node is None or node.domain:
        return None
    if node.op_type in ("Squeeze", "Cast", "Identity", "Reshape", "Unsqueeze"):
        return _dim_of(node.inputs[0])
    if node.op_type == "Shape":
        dims = _dims_of_shape(node)
        return dims[0] if len(dims) == 1 else None
    shape = node.inputs[0].producer() if node.inputs and node.inputs[0] is not None else None
    if node.op_type != "Gather" or shape is None or shape.op_type != "Shape":
        return None
    index = None if node.inputs[1] is None else ir.convenience.get_const_tensor(node.inputs[1])
    dims = _dims_of_shape(shape)
    if index is None or index.size != 1 or not -len(dims) <= int(index.numpy().item()) < len(dims):
        return None
    return dims[int(index.numpy().item())]


def _dims_of_shape(node: ir.Node) -> list[int | ir.SymbolicDim]:
    x = node.inputs[0]
    dims: Iterable[int | ir.SymbolicDim] = () if x is None or x.shape is None else x.shape
    return list(dims)[node.attributes.get_int("start", 0) : node.attributes.get_int("end", 99)]
