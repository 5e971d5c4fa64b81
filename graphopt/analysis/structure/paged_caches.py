"""What a graph says about caches that lie in pages: per ``KVAttention`` node its sizes, storage and policy.

A graph has it in the attributes of its nodes. An onnxruntime session does not show those, so the passes that make such
nodes also write them into the model's metadata under :data:`METADATA`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

from graphopt.analysis.structure.ports import BLOCK_TABLE, PAST_LENGTH, STATES, CachePort, past_port
from graphopt.errors import InputError
from graphopt.runtime_ops import DOMAIN
from graphopt.runtime_ops import port as input_of
from graphopt.runtime_ops.kv_attention.spec.attributes import Dimension, KVAttributes, StateTensor
from graphopt.runtime_ops.kv_attention.spec.schema import SCHEMA

if TYPE_CHECKING:
    from collections.abc import Mapping

    import onnx_ir as ir

OPERATOR = SCHEMA.name
METADATA = "ai.graphopt.kv"
"""Key of the model's metadata that lists the layers as JSON."""

UNBOUNDED_POSITIONS = "graphopt.unbounded"
"""Metadata of a ``KVAttention`` node that takes positions of any size."""


@dataclass(frozen=True)
class PagedLayer:
    """The cache of one layer.

    Attributes:
        number: N in ``past_key_values.N.keys``.
        head_size: numbers of a key or value.
        attributes: what the ``KVAttention`` node says.
        has_unbounded_positions: whether positions may go past those that the model was trained on: no query sees a
            distance of more than :attr:`reach` tokens.
    """

    number: int
    head_size: int
    attributes: KVAttributes
    has_unbounded_positions: bool = False

    @property
    def reach(self) -> int:
        """The tokens that a query reads of a cache whose pages go round."""
        kv = self.attributes
        return kv.sinks + max(kv.recent, kv.window)

    @property
    def wraps(self) -> bool:
        """Whether new pages may take the place of old ones: no head reads those again."""
        return self.attributes.may_drop

    def pages(self, tokens: int, new_tokens: int) -> int:
        """Return the pages that a row needs, at least 1.

        Args:
            tokens: tokens of the longest row, those of the next call included.
            new_tokens: columns of the longest call.
        """
        kv = self.attributes
        count = max(1, -(-tokens // kv.page))
        if not self.wraps:
            return count
        return min(count, kv.first_pages + -(-kv.tokens_to_keep(new_tokens) // kv.page))

    def states(self, batch: Dimension, pages: Dimension) -> dict[str, StateTensor]:
        """Return the state tensors in use, by their names in :data:`graphopt.analysis.structure.ports.STATES`."""
        shapes = self.attributes.state(batch, pages, self.head_size)
        return {name: tensor for name, tensor in shapes if 0 not in tensor.shape[1:]}

    def port(self, state: str) -> str:
        """Return the graph input of a state tensor."""
        return CachePort(self.number, state).past

    def bytes(self, batch: int, pages: int) -> int:
        """Return the bytes of the states of ``batch`` rows of ``pages`` pages."""
        return sum(tensor.bytes for tensor in self.states(batch, pages).values())

    @cached_property
    def ports(self) -> tuple[str, ...]:
        """The graph inputs of the state tensors that are in use."""
        return tuple(self.port(state) for state in self.states(1, 1))


def kv_nodes(graph: ir.Graph) -> list[ir.Node]:
    """Return the ``KVAttention`` nodes of the graph, in order."""
    return [node for node in graph if node.domain == DOMAIN and node.op_type == OPERATOR]


def layer_of(node: ir.Node) -> PagedLayer:
    """Read the attributes of a ``KVAttention`` node.

    Raises:
        InputError: its keys are no graph input of the name that graphopt gives them, or an attribute is out of range.
    """
    key, keys = input_of(node, "key"), input_of(node, "keys")
    port = past_port(keys)
    width = None if key is None or key.shape is None else key.shape[-1]
    if port is None or port.part != STATES[0] or not isinstance(width, int):
        raise InputError(
            f"a {OPERATOR} node whose keys are no input past_key_values.N.keys, or whose width is not known",
            node=node.name,
            tensor=None if keys is None else keys.name,
        )
    names = {field.name for field in fields(KVAttributes)}
    values: dict[str, Any] = {name: attribute.value for name, attribute in node.attributes.items() if name in names}
    try:
        attributes = KVAttributes(**values)
    except (TypeError, ValueError) as error:
        raise InputError(str(error), node=node.name) from error
    return PagedLayer(port.layer, width // attributes.kv_heads, attributes, UNBOUNDED_POSITIONS in node.metadata_props)


def layers_of(graph: ir.Graph) -> tuple[PagedLayer, ...]:
    """Read all ``KVAttention`` nodes of the graph; see :func:`layer_of`."""
    return tuple(layer_of(node) for node in kv_nodes(graph))


def has_growing_caches(graph: ir.Graph) -> bool:
    """Return whether caches of the graph get longer at each step: they lie neither in pages nor in a pool of blocks."""
    names = {value.name for value in graph.inputs}
    return any(past_port(value) for value in graph.inputs) and PAST_LENGTH not in names and BLOCK_TABLE not in names


def describe(model: ir.Model) -> None:
    """Write the layers into the metadata of ``model``, where a session can read them."""
    model.metadata_props[METADATA] = to_json(layers_of(model.graph))


def layers_from_metadata(metadata: Mapping[str, str]) -> tuple[PagedLayer, ...]:
    """Read back what :func:`describe` wrote; empty for a graph without pages.

    Raises:
        InputError: it is not what :func:`describe` writes.
    """
    try:
        return from_json(metadata.get(METADATA, "[]"))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(
            f"the metadata {METADATA} of the model cannot be read: {error}",
            remedy="make the model again with `graphopt optimize`",
        ) from error


def to_json(layers: tuple[PagedLayer, ...]) -> str:
    """Write layers as JSON."""
    entries = [
        {
            "number": layer.number,
            "head_size": layer.head_size,
            "unbounded": layer.has_unbounded_positions,
            **layer.attributes.for_node(),
        }
        for layer in layers
    ]
    return json.dumps(entries)


def from_json(text: str) -> tuple[PagedLayer, ...]:
    """Read what :func:`to_json` wrote.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: it is something else.
    """
    return tuple(
        PagedLayer(
            int(entry.pop("number")),
            int(entry.pop("head_size")),
            has_unbounded_positions=bool(entry.pop("unbounded", False)),
            attributes=KVAttributes(**entry),
        )
        for entry in json.loads(text)
    )
