"""Where keys get their positions: the part of a graph between keys that know none and those that a cache stores.

    x = MatMul(h, W_k)                         what a token says, whatever its place: a source
    key = Hadamard(RotaryEmbedding(x, positions))          the part, whatever operators it is made of
    KVAttention(query, key, value, ...)                    stores it

An operator that takes both what tokens say and what only positions say gives positions to what it writes. Such an
operator may lie between the source and the key of one layer. Where it writes what values are made of, or keys of
several layers, positions are part of the hidden states (learned ones are added to embeddings), and no key can be moved.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from math import prod
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.analysis.structure.paged_caches import OPERATOR, kv_nodes, layer_of
from graphopt.analysis.structure.ports import NEW_LENGTH, PAST_LENGTH, POSITION_IDS
from graphopt.errors import InputError
from graphopt.runtime_ops import DOMAIN
from graphopt.runtime_ops import port as input_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_REMEDY = "read the text again"

_CONSTANT, _POSITIONS, _TOKENS = range(3)
"""What a value depends on; a number includes those below it."""


@dataclass(frozen=True)
class KeyPart:
    """The part of a graph that gives positions to the keys of a layer.

    Attributes:
        layer: N in ``past_key_values.N.keys``.
        key: the value that is stored, [batch, length, KV heads x head size].
        sources: what the part makes it of besides positions, one number of a token for each of the key; none where keys
            know no positions.
    """

    layer: int
    key: ir.Value
    sources: tuple[ir.Value, ...]


def key_parts(graph: ir.Graph) -> tuple[KeyPart, ...]:
    """Return the part of each layer of a graph whose caches lie in pages, in order.

    Raises:
        InputError: positions are part of the hidden states, or the keys of a layer are no function of positions and of
            as many numbers.
    """
    kinds = _kinds_of_values(graph)
    order = {node: index for index, node in enumerate(graph)}
    owners: dict[ir.Node, int] = {}
    parts = []
    for node in kv_nodes(graph):
        layer, key = layer_of(node), input_of(node, "key")
        assert key is not None  # layer_of has read its shape
        value = None if layer.attributes.value_size else input_of(node, "value")
        for mixer in _mixers(() if value is None else (value,), kinds):
            raise _position_error(mixer, f"the values of layer {layer.number}")
        mixers = list(_mixers((key,), kinds))
        for mixer in mixers:
            if owners.setdefault(mixer, layer.number) != layer.number:
                raise _position_error(mixer, f"the keys of layers {owners[mixer]} and {layer.number}")
        width = layer.head_size * layer.attributes.kv_heads
        sources = _sources(key, set(mixers), kinds, order, width) if mixers else ()
        parts.append(KeyPart(layer.number, key, sources))
    return tuple(parts)


def cut_out(model: ir.Model, parts: Iterable[KeyPart]) -> ir.Model:
    """Return the model that makes keys of the sources of ``parts`` and of positions; it reads only those inputs.

    Raises:
        ValueError: it cannot be cut out.
    """
    sources = list(dict.fromkeys(source for part in parts for source in part.sources))
    positions = [value for value in model.graph.inputs if value.name in (POSITION_IDS, PAST_LENGTH, NEW_LENGTH)]
    keys = [part.key for part in parts if part.sources]
    graph = ir.convenience.extract(model.graph, [*positions, *sources], keys)
    for value in [value for value in graph.inputs if not value.uses()]:
        graph.inputs.remove(value)
    return ir.Model(graph, ir_version=model.ir_version, functions=[f.clone() for f in model.functions.values()])


def _kinds_of_values(graph: ir.Graph) -> dict[ir.Value, int]:
    names = {value.name for value in graph.inputs}
    positions = (POSITION_IDS,) if POSITION_IDS in names else (PAST_LENGTH, NEW_LENGTH)
    kinds = dict.fromkeys(graph.initializers.values(), _CONSTANT)
    counts = (POSITION_IDS, PAST_LENGTH, NEW_LENGTH)
    for value in graph.inputs:
        kinds[value] = _POSITIONS if value.name in positions else _CONSTANT if value.name in counts else _TOKENS
    for node in graph:
        # the lengths of a call say nothing of its tokens
        kind = _CONSTANT if node.op_type in ("Shape", "Size") else _kind_of_node(node, kinds)
        kinds |= dict.fromkeys(node.outputs, kind)
    return kinds


def _kind_of_node(node: ir.Node, kinds: dict[ir.Value, int]) -> int:
    return _TOKENS if _is_attention(node) else max((kinds[value] for value in node.inputs if value), default=_CONSTANT)


def _is_attention(node: ir.Node) -> bool:
    return node.domain == DOMAIN and node.op_type == OPERATOR


def _mixers(values: Iterable[ir.Value], kinds: dict[ir.Value, int]) -> Iterator[ir.Node]:
    """Yield the nodes before ``values``, up to attention, that give positions to what tokens say."""
    stack, known_nodes = list(values), set()
    while stack:
        node = stack.pop().producer()
        if node is None or node in known_nodes or _is_attention(node):
            continue
        known_nodes.add(node)
        inputs = [value for value in node.inputs if value and kinds[value] > _CONSTANT]
        tokens = [value for value in inputs if kinds[value] == _TOKENS]
        if tokens and len(tokens) < len(inputs):
            yield node
        stack += tokens


def _sources(
    key: ir.Value, mixers: set[ir.Node], kinds: dict[ir.Value, int], order: dict[ir.Node, int], width: int
) -> tuple[ir.Value, ...]:
    """Return what, with positions, a key is made of in front of ``mixers``: values of ``width`` numbers of a token."""
    part, sources = _nodes_behind(mixers, key, order), list[ir.Value]()

    def add_inputs(node: ir.Node) -> None:
        for value in node.inputs:
            if value and kinds[value] == _TOKENS and value.producer() not in part and value not in sources:
                sources.append(value)

    for node in part:
        add_inputs(node)
    while len(sources) > 1 and sum(map(_width, sources)) != width:
        # two sources that are made of the same numbers: the part grows until it begins with those
        before = {value: value.producer() for value in sources}
        last = max((node for node in before.values() if node is not None), key=order.__getitem__, default=None)
        if last is None or _is_attention(last):
            break
        part.add(last)
        sources = [value for value in sources if before[value] is not last]
        add_inputs(last)
    if sum(map(_width, sources)) != width:
        raise InputError(
            f"keys of {width} numbers are made of positions and of {', '.join(f'{s.name} {s.shape}' for s in sources)}",
            tensor=key.name,
            remedy=_REMEDY,
        )
    return tuple(sources)


def _nodes_behind(mixers: set[ir.Node], key: ir.Value, order: dict[ir.Node, int]) -> set[ir.Node]:
    """Return ``mixers`` and the nodes between them and ``key``; ``order`` is that of all nodes of the graph."""
    readers: set[ir.Node] = set()
    last_node = key.producer()
    assert last_node is not None  # mixers make it
    first, last = min(map(order.__getitem__, mixers)), order[last_node]
    for node in islice(order, first, last + 1):
        if node in mixers or (
            not _is_attention(node) and any(value.producer() in readers for value in node.inputs if value)
        ):
            readers.add(node)
    stack, part = list[ir.Node | None]([last_node]), set[ir.Node]()
    while stack:
        before = stack.pop()
        if before in readers and before not in part:
            part.add(before)
            stack += [value.producer() for value in before.inputs if value]
    return part


def _width(value: ir.Value) -> int:
    """Return the numbers of a token in a value, whose batch and length have names; 0 where its shape is not known."""
    if value.shape is None:
        return 0
    return prod(size for size in value.shape if isinstance(size, int))


def _position_error(node: ir.Node, readers: str) -> InputError:
    return InputError(
        f"tokens cannot move: {node.op_type} gives positions to what {readers} are made of",
        node=node.name,
        remedy=f"{_REMEDY}: only keys may know positions",
    )
