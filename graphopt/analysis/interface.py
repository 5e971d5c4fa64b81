"""The names and shapes by which a language-model graph is fed and read.

Inputs: ``input_ids`` int64 [batch, length], optional ``attention_mask`` int64 [batch, past + length], optional
``position_ids`` int64 [batch, length], and per layer N ``past_key_values.N.key`` and ``.value`` [batch, KV heads,
past, head size]. Outputs: ``logits`` [batch, length, vocabulary], ``present.N.key`` and ``.value`` [batch, KV heads,
past + length, head size]. An empty past makes the same graph a prefill. A graph whose logits are [batch, 1, vocabulary]
makes those of the last position only.

A graph of ``ai.graphopt::KVAttention`` owns its caches in pages. Instead of ``attention_mask`` it has ``past_length``
and ``new_length`` int64 [batch]: how many tokens a row has stored, and how many columns of this call, the last ones,
are tokens of it. Instead of a growing ``key`` and ``value`` it has the state tensors ``past_key_values.N.keys``,
``.values`` and, where they are in use, ``.scales``, ``.recent``, ``.summaries`` [batch, KV heads, pages, ...].
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from graphopt.analysis.contrib import PADDING, counts_from_first_column
from graphopt.analysis.paged import STATES, PagedLayer, described, layers_of
from graphopt.errors import InputError

if TYPE_CHECKING:
    import onnxruntime

IntArray = npt.NDArray[np.int64]
Array = npt.NDArray[np.generic]

_CACHE_INPUT = re.compile(rf"past_key_values\.(\d+)\.(key|value|{'|'.join(STATES)})")
_LENGTHS = ("past_length", "new_length")
_FED = {"input_ids", "attention_mask", "position_ids", *_LENGTHS}
_DTYPES = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(double)": np.float64,
    "tensor(int64)": np.int64,
    "tensor(uint8)": np.uint8,
    "tensor(bfloat16)": ml_dtypes.bfloat16,
    "tensor(float8e4m3fn)": ml_dtypes.float8_e4m3fn,
}


@dataclass(frozen=True)
class Port:
    """One graph input or output: its name, its dtype, and its shape with ``None`` for a dimension that varies."""

    name: str
    dtype: np.dtype[np.generic] | None
    shape: tuple[int | None, ...]


@dataclass(frozen=True)
class Interface:
    """How a language-model graph is fed and read.

    Attributes:
        inputs: all inputs, by name.
        outputs: all outputs, by name.
        past: names of the cache inputs, in the order of the graph.
        present: the output that continues each cache input, in the same order.
        layers: sizes and policies of caches that lie in pages; none where they grow.
        pads: whether ``attention_mask``, if it is an input, may hide columns in front of a row's tokens.
    """

    inputs: Mapping[str, Port]
    outputs: Mapping[str, Port]
    past: tuple[str, ...]
    present: tuple[str, ...]
    layers: tuple[PagedLayer, ...] = ()
    pads: bool = True

    @classmethod
    def of_graph(cls, graph: ir.Graph) -> Interface:
        """Read the interface of ``graph``; see :meth:`of_ports` for the errors."""
        ports = map(_port_of_value, graph.inputs), map(_port_of_value, graph.outputs)
        return cls.of_ports(*ports, layers_of(graph), pads=not counts_from_first_column(graph))

    @classmethod
    def of_session(cls, session: onnxruntime.InferenceSession) -> Interface:
        """Read the interface of an onnxruntime session; see :meth:`of_ports` for the errors."""
        metadata = session.get_modelmeta().custom_metadata_map
        ports = map(_port_of_node, session.get_inputs()), map(_port_of_node, session.get_outputs())
        return cls.of_ports(*ports, described(metadata), pads=metadata.get(PADDING) != "none")

    @classmethod
    def of_ports(
        cls,
        inputs: Iterable[Port],
        outputs: Iterable[Port],
        layers: tuple[PagedLayer, ...] = (),
        *,
        pads: bool = True,
    ) -> Interface:
        """Sort inputs and outputs into their roles; ``layers`` says what caches in pages are, ``pads`` as above.

        Raises:
            InputError: a name is missing, or an input is none that a language model has.
        """
        ins, outs = {port.name: port for port in inputs}, {port.name: port for port in outputs}
        past = tuple(name for name in ins if _CACHE_INPUT.fullmatch(name))
        present = tuple(name.replace("past_key_values", "present") for name in past)
        for name, ports in (("input_ids", ins), ("logits", outs), *((name, outs) for name in present)):
            if name not in ports:
                raise InputError(
                    f"the graph has no {'input' if ports is ins else 'output'} of this name",
                    tensor=name,
                    remedy=f"it has {', '.join(ports)}; export it with `graphopt export`, or rename it",
                )
        unknown = [name for name in ins if name not in _FED and name not in past]
        if unknown:
            raise InputError(
                "the graph has an input that graphopt does not know how to feed",
                tensor=unknown[0],
                remedy="known are input_ids, attention_mask, position_ids and past_key_values.N.key/.value",
            )
        _check_pages(ins, past, layers)
        return cls(ins, outs, past, present, layers, pads)

    @property
    def paged(self) -> bool:
        """Whether the caches lie in pages, which the caller allocates and the graph fills."""
        return bool(self.layers)

    @property
    def takes_padding(self) -> bool:
        """Whether rows of different length can share a batch."""
        return self.pads and ("attention_mask" in self.inputs or "new_length" in self.inputs)

    @property
    def why_no_padding(self) -> str:
        """What to say where :attr:`takes_padding` is false."""
        there = "attention_mask" in self.inputs
        cause = "counts a row's tokens from its first column" if there else "has no attention_mask input"
        return f"this graph {cause}, so prompts of different length cannot share a batch"

    @property
    def vocabulary(self) -> int | None:
        """Width of the logits, or ``None`` where the graph does not say."""
        shape = self.outputs["logits"].shape
        return shape[-1] if shape else None

    @property
    def last_logits(self) -> bool:
        """Whether the graph makes logits of the last position of a call only."""
        shape = self.outputs["logits"].shape
        return len(shape) == 3 and shape[1] == 1

    @property
    def reach(self) -> int | None:
        """Where positions are unbounded, the tokens that a query reads at most."""
        bounded = not self.layers or any(not layer.unbounded for layer in self.layers)
        return None if bounded else max(layer.reach for layer in self.layers)

    def empty_past(self, batch: int, room: int = 0) -> dict[str, Array]:
        """Return a cache of length 0 for ``batch`` sequences, by input name.

        Args:
            batch: number of sequences.
            room: tokens per row that caches in pages must have room for; others grow by themselves.

        Raises:
            InputError: the graph does not state the number of KV heads or the head size.
        """
        if self.paged:
            return {
                layer.port(state): tensor.zeros()
                for layer in self.layers
                for state, tensor in layer.states(batch, max(1, -(-room // layer.attributes.page))).items()
            }
        caches: dict[str, Array] = {}
        for name in self.past:
            port = self.inputs[name]
            if len(port.shape) != 4 or port.shape[1] is None or port.shape[3] is None or port.dtype is None:
                raise InputError(
                    "a cache input must state its KV heads and head size", tensor=name, shape=list(port.shape)
                )
            caches[name] = np.zeros((batch, port.shape[1], 0, port.shape[3]), port.dtype)
        return caches

    def feeds(
        self, input_ids: IntArray, attention_mask: IntArray, past: Mapping[str, Array], *, padded: bool = True
    ) -> dict[str, Array]:
        """Return what to feed for one step.

        Args:
            input_ids: the new tokens, [batch, length].
            attention_mask: 1 for a real token, 0 for padding, [batch, past + length].
            past: the caches by input name, as from :meth:`empty_past` or an earlier step.
            padded: whether a 0 in ``attention_mask`` must be obeyed; a graph without that input refuses it.

        Raises:
            InputError: there is padding, and the graph has no ``attention_mask``; or it has lengths instead, and the
                new tokens of a row do not stand at its end.
        """
        if not self.takes_padding and padded and not attention_mask.all():
            raise InputError(self.why_no_padding, remedy="run the prompts one by one, or optimize the model first")
        positions = np.maximum(attention_mask.cumsum(-1) - 1, 0)[:, -input_ids.shape[1] :]
        feeds: dict[str, Array] = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": positions,
            **past,
        }
        if self.paged:
            feeds |= _lengths(attention_mask, input_ids.shape[1])
        return {name: np.ascontiguousarray(value) for name, value in feeds.items() if name in self.inputs}


def new_lengths(mask: IntArray) -> IntArray:
    """Return how many of the columns of ``mask`` [batch, length] are tokens, int64 [batch]: the last ones of each row.

    Raises:
        InputError: in a row, padding stands behind a token.
    """
    if (np.diff(mask, axis=1) < 0).any():
        raise InputError(
            "the caches of this graph take padding in front of a row's new tokens only",
            remedy="put the padding of each call on the left",
        )
    counts: IntArray = mask.sum(axis=1, dtype=np.int64)
    return counts


def _lengths(attention_mask: IntArray, length: int) -> dict[str, Array]:
    past = attention_mask[:, : attention_mask.shape[1] - length].sum(axis=1, dtype=np.int64)
    return {"past_length": past, "new_length": new_lengths(attention_mask[:, -length:])}


def _check_pages(inputs: Mapping[str, Port], past: Sequence[str], layers: Sequence[PagedLayer]) -> None:
    """Refuse a graph whose caches are not what its layers say."""
    told = {name for layer in layers for name in layer.ports}
    there = {name for name in past if name.rpartition(".")[2] in STATES}
    odd = sorted((told ^ there) | ({*past} - there if told else set()))
    odd += [name for name in _LENGTHS if (name in inputs) != bool(told)]
    if odd:
        raise InputError(
            "the graph's caches in pages are not what its metadata says",
            tensor=odd[0],
            remedy="make the model again with `graphopt optimize`; other tools may drop its metadata",
        )


def _port_of_value(value: ir.Value) -> Port:
    dims: Sequence[object] = () if value.shape is None else tuple(value.shape)
    return Port(
        value.name or "",
        None if value.dtype is None else value.dtype.numpy(),
        tuple(dim if isinstance(dim, int) else _fixed(str(dim)) for dim in dims),
    )


def _port_of_node(node: onnxruntime.NodeArg) -> Port:
    dtype = _DTYPES.get(node.type)
    return Port(
        node.name,
        None if dtype is None else np.dtype(dtype),
        tuple(dim if isinstance(dim, int) else _fixed(str(dim)) for dim in node.shape),
    )


def _fixed(symbol: str) -> int | None:
    # The exporter writes a fixed dimension that it traced as symbolic as the symbol "8".
    return int(symbol) if symbol.isdigit() else None
