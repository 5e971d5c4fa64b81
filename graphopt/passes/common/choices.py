"""What a trained indexer chooses, as exporters write it: the tokens of best scores are the ones that a mask shows.

    K    = Concat(<past keys of the indexer>, new)                       [batch, past + length, size]
    s    = <any arithmetic of K and the new tokens>                      [batch, length, past + length]
    best = TopK(<s where the causal mask shows it>, Min(k, past + length))
    m    = <causal mask>, hidden where ScatterElements(ones, best, zeros) is not 0
    Attention(q, <all keys>, <all values>, m)

(DeepSeek-V3.2, DeepSeek-AI 2025, section 2.1.) Layers that share a choice have masks of one ``TopK``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.analysis.structure.ports import ATTENTION_MASK, INDEXER, past_port, token_port
from graphopt.graph.diagnostics import Fact, Rule
from graphopt.graph.editing import Inserter
from graphopt.passes.common.nodes import ELEMENTWISE, scalar

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

KEPT_STEP = 2
"""Where a mask is run for what it means, every second position stands for what is chosen."""

_BY_ROWS = frozenset(("MatMul", "Squeeze", "Unsqueeze", "Transpose", *ELEMENTWISE))
_SHAPE_OPS = frozenset(("Cast", "Identity", "Reshape", "Unsqueeze"))

NO_KEYS = Rule("choices.no-keys", "what {node} chooses by is no arithmetic of keys that an indexer caches")
OTHER_STEP = Rule("choices.other-step", "{op} {node} between the keys of an indexer and its choice is not understood")
NO_COUNT = Rule("choices.no-count", "how many tokens {node} chooses is no constant")
NO_MASK = Rule("choices.no-mask", "{node} chooses by scores that no mask hides")


@dataclass(frozen=True)
class Choice:
    """What an indexer chooses.

    Attributes:
        top: the ``TopK`` node.
        count: how many tokens it chooses of more.
        past: the input with the keys of stored tokens, [batch, 1, past, size].
        present: keys of all tokens, [batch, past + length, size].
        new: keys of the new tokens, [batch, length, size].
        mask: of its scores: boolean, true where a score is hidden or, if ``is_shown``, where it counts; or a number
            that is added.
        is_shown: whether the mask is true where a score counts.
        scores: before the mask, [batch, length, past + length].
        steps: what makes the scores of ``present`` and of the new tokens, in order.
    """

    top: ir.Node
    count: int
    past: ir.Value
    present: ir.Value
    new: ir.Value
    mask: ir.Value
    is_shown: bool
    scores: ir.Value
    steps: tuple[ir.Node, ...]

    @property
    def layer(self) -> int:
        """The layer whose cache has the keys."""
        port = past_port(self.past)
        assert port is not None
        return port.layer

    @property
    def size(self) -> int:
        """Numbers of a key."""
        assert self.new.shape is not None
        return int(str(self.new.shape[-1]))


def chosen_indices(value: ir.Value) -> list[ir.Value]:
    """Return the indices of each ``TopK`` that ``value`` is computed of, without those behind another one."""
    indices: dict[ir.Value, None] = {}
    waiting, values = [value], {value}
    while waiting:
        current = waiting.pop()
        node = current.producer()
        if node is None:
            continue
        if node.op_type == "TopK" and not node.domain and current.index() == 1:
            indices[current] = None
            continue
        for x in node.inputs:
            if x is not None and x not in values:
                values.add(x)
                waiting.append(x)
    return list(indices)


def part_with_known_choices(model: ir.Model, value: ir.Value, indices: Sequence[ir.Value]) -> ir.Model | None:
    """Return the part of a model that computes ``value``, where every second position stands for what is chosen.

    ``None`` where the graph has no ``attention_mask`` that would say how many positions there are.

    Raises:
        ValueError: it cannot be cut out, since it captures values of an outer graph.
    """
    mask = next((port for port in model.graph.inputs if port.name == ATTENTION_MASK), None)
    tokens = token_port(model.graph)
    if mask is None or tokens is None:
        return None
    part = ir.convenience.extract(model.graph, [*model.graph.inputs, *indices], [value])
    ports = {port.name: port for port in part.inputs}
    insert = Inserter(part, part[0], "known_choice")
    tokens_shape = insert.op("Shape", [ports[tokens.name]], [2], ir.DataType.INT64, "rows", start=0, end=2)
    length = insert.op("Shape", [ports[ATTENTION_MASK]], [1], ir.DataType.INT64, "length", start=1, end=2)
    end = insert.op("Squeeze", [length], [], ir.DataType.INT64, "end")
    positions = insert.op(
        "Range", [insert.integers(0), end, insert.integers(KEPT_STEP)], [None], ir.DataType.INT64, "positions"
    )
    shape = insert.op("Concat", [tokens_shape, insert.integers([1])], [3], ir.DataType.INT64, "shape", axis=0)
    constants = insert.op("Expand", [positions, shape], [None] * 3, ir.DataType.INT64, "indices")
    for index in indices:
        port = ports[index.name]
        port.replace_all_uses_with(constants)
        part.inputs.remove(port)
    for port in [port for port in part.inputs if not port.uses()]:
        part.inputs.remove(port)
    return ir.Model(part, ir_version=model.ir_version)


def choice_of(graph: ir.Graph, indices: ir.Value) -> Choice | Fact:
    """Return what the indexer chooses whose ``TopK`` makes ``indices``, or why that is not known."""
    top = indices.producer()
    assert top is not None
    count = _count(top.inputs[1])
    if count is None:
        return NO_COUNT(node=top.name)
    hidden = _without_mask(top.inputs[0])
    if hidden is None:
        return NO_MASK(node=top.name)
    scores, mask, is_shown = hidden
    for past, present, new in _caches(graph):
        steps = _steps(present, scores)
        if isinstance(steps, Fact):
            return steps
        if steps:
            return Choice(top, count, past, present, new, mask, is_shown, scores, steps)
    return NO_KEYS(node=top.name)


def _count(value: ir.Value | None) -> int | None:
    """Return k of Min(k, <how many there are>), or of a constant."""
    while value is not None and value.const_value is None:
        node = value.producer()
        if node is None or node.domain:
            return None
        if node.op_type == "Min":
            constants = [scalar(x) for x in node.inputs]
            numbers = [number for number in constants if number is not None]
            return int(numbers[0]) if len(numbers) == 1 else None
        if node.op_type not in _SHAPE_OPS:
            return None
        value = node.inputs[0]
    number = scalar(value)
    return None if number is None else int(number)


def _without_mask(value: ir.Value | None) -> tuple[ir.Value, ir.Value, bool] | None:
    """Return s of Where(m, -inf, s), Where(m, s, -inf) or Add(s, m), then m, and whether m is true where s counts."""
    node = None if value is None else value.producer()
    if node is None or node.domain or any(x is None for x in node.inputs):
        return None
    inputs = [x for x in node.inputs if x is not None]
    if node.op_type == "Where":
        mask, first, second = inputs
        lowest = [scalar(x) == float("-inf") for x in (first, second)]
        return (second, mask, False) if lowest[0] else (first, mask, True) if lowest[1] else None
    if node.op_type != "Add":
        return None
    # of the two the mask is not computed of activations: nothing that it is made of is a product of matrices
    masks = [x for x in inputs if not _has_product(x)]
    scores = [x for x in inputs if x not in masks]
    return (scores[0], masks[0], True) if len(masks) == len(scores) == 1 else None


def _has_product(value: ir.Value) -> bool:
    waiting, values = [value], set[ir.Value]()
    while waiting:
        current = waiting.pop()
        node = current.producer()
        if node is None or current in values:
            continue
        values.add(current)
        if node.op_type in ("MatMul", "Attention"):
            return True
        waiting += [x for x in node.inputs if x is not None]
    return False


def _caches(graph: ir.Graph) -> Iterator[tuple[ir.Value, ir.Value, ir.Value]]:
    """Yield past, present and new keys of each indexer."""
    for past in graph.inputs:
        port = past_port(past)
        if port is None or port.part != INDEXER:
            continue
        for row in [past, *(use.node.outputs[0] for use in past.uses() if use.node.op_type == "Squeeze")]:
            for use in row.uses():
                node = use.node
                is_concat = node.op_type == "Concat" and not node.domain and len(node.inputs) == 2 and use.idx == 0
                new, present = node.inputs[-1], node.outputs[0]
                if is_concat and new is not None and new.shape is not None and len(new.shape) == 3:
                    yield past, present, new


def _steps(present: ir.Value, scores: ir.Value) -> tuple[ir.Node, ...] | Fact:
    """Return the nodes between the keys of an indexer and its scores; none where it is the key of another."""
    assert present.shape is not None
    positions = str(present.shape[1])
    nodes: list[ir.Node] = []
    waiting, has_keys = [scores], False
    while waiting:
        value = waiting.pop()
        if value is present:
            has_keys = True
            continue
        node = value.producer()
        of_keys = value.shape is not None and positions in map(str, value.shape)
        if node is None or not of_keys or node in nodes:
            continue
        nodes.append(node)
        waiting += [x for x in node.inputs if x is not None]
    if not has_keys:
        return ()
    for node in nodes:
        turns = node.op_type == "Transpose" and node.attributes.get_ints("perm", (1,))[0] != 0
        if node.domain or node.op_type not in _BY_ROWS or turns:
            return OTHER_STEP(op=node.op_type, node=node.name)
    order = {node: index for index, node in enumerate(nodes)}
    graph = nodes[0].graph
    assert graph is not None
    return tuple(node for node in graph if node in order)
