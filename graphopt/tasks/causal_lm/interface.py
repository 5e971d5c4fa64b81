"""The names and shapes by which a language-model graph is fed and read.

Inputs: ``input_ids`` int64 [batch, length], optional ``attention_mask`` int64 [batch, past + length], optional
``position_ids`` int64 [batch, length], and per layer N ``past_key_values.N.key`` and ``.value`` [batch, KV heads,
past, head size]. Outputs: ``logits`` [batch, length, vocabulary], ``present.N.key`` and ``.value`` [batch, KV heads,
past + length, head size]. A layer with a trained indexer has ``past_key_values.N.indexer_key`` [batch, 1, past, size]
besides, keys by which it chooses what attention reads. A layer with a recurrence has ``past_key_values.N.conv_state``
[batch, channels, taps - 1] and ``.recurrent_state`` [batch, heads, K, V] instead or as well, zeros at first, which come
back in the same shape. An empty past makes the same graph a prefill. A graph whose logits are [batch, 1, vocabulary]
makes those of the last position only, and one with [batch, last_K, vocabulary] those of the last K. An output
``last_hidden_state`` [batch, length, width], if there is one, is what the product reads that makes the logits.

A graph of ``ai.graphopt::KVAttention`` owns its caches in pages. Instead of ``attention_mask`` it has ``past_length``
and ``new_length`` int64 [batch]: how many tokens a row has stored, and how many columns of this call, the last ones,
are tokens of it. Instead of a growing ``key`` and ``value`` it has the state tensors ``past_key_values.N.keys``,
``.values`` and, where they are in use, ``.scales``, ``.recent``, ``.summaries`` [batch, KV heads, pages, ...].

A graph of ``ai.graphopt::PagedAttention`` is fed by an engine: ``input_ids`` int64 [tokens], of all requests one
behind the other, ``cumulative_sequence_lengths`` int32 [batch + 1], ``past_sequence_lengths`` int32 [batch],
``block_table`` int32 [batch, blocks], and per layer N ``past_key_values.N.key`` and ``.value`` [blocks, tokens of a
block, KV heads, head size], which come back in the same shape; of blocks of integers also ``.key_scale`` and
``.value_scale`` [blocks, tokens of a block, KV heads]; and recurrent states [batch, ...]. Its logits are [batch,
vocabulary].

A decoder with cross-attention, see :mod:`graphopt.tasks.seq2seq`, has besides what its encoder made of the source:
``cross_key_values.N.key`` and ``.value`` [batch, heads, source, head size] and ``encoder_attention_mask`` [batch,
source]. They are inputs only.

The decoder of a vision-language model, see :mod:`graphopt.tasks.vision_language`, has ``inputs_embeds`` float [batch,
length, width] in the place of ``input_ids``: another graph looks tokens up, and puts images among them. Where
``position_ids`` are [3, batch, length], a token has a position in time, one in height and one in width (M-RoPE,
Qwen2-VL, Wang et al. 2024, arXiv:2409.12191); those of text are the same.

A head that drafts, see :mod:`graphopt.tasks.mtp_head`, has ``previous_hidden_state`` float [batch, length, width]
beside ``input_ids``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from graphopt.analysis.structure.contrib import PADDING, counts_from_first_column, stated_windows, windows_of
from graphopt.analysis.structure.paged_caches import PagedLayer, layers_from_metadata, layers_of
from graphopt.analysis.structure.ports import (
    ATTENTION_MASK,
    BLOCK_TABLE,
    ENCODER_MASK,
    HIDDEN,
    INPUT_IDS,
    INPUTS_EMBEDS,
    LOGITS,
    NEW_LENGTH,
    PAST_LENGTH,
    PAST_LENGTHS,
    POSITION_IDS,
    PREVIOUS_HIDDEN,
    STARTS,
    STATES,
    is_cross_port,
    past_port,
)
from graphopt.analysis.structure.products import last_positions
from graphopt.errors import InputError
from graphopt.tasks.ports import Array, IntArray, Port, port_of_node, port_of_value

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import onnx_ir as ir
    import onnxruntime

_LENGTHS = (PAST_LENGTH, NEW_LENGTH)
_INPUTS = {
    *(INPUT_IDS, INPUTS_EMBEDS, PREVIOUS_HIDDEN, ATTENTION_MASK, POSITION_IDS),
    *(*_LENGTHS, STARTS, PAST_LENGTHS, BLOCK_TABLE),
}


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
        windows: the tokens that a cache input holds which is cut to a window, by name.
    """

    inputs: Mapping[str, Port]
    outputs: Mapping[str, Port]
    past: tuple[str, ...]
    present: tuple[str, ...]
    layers: tuple[PagedLayer, ...] = ()
    pads: bool = True
    windows: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of_graph(cls, graph: ir.Graph) -> Interface:
        """Read the interface of ``graph``; see :meth:`of_ports` for the errors."""
        ports = map(port_of_value, graph.inputs), map(port_of_value, graph.outputs)
        return cls.of_ports(
            *ports, layers_of(graph), pads=not counts_from_first_column(graph), windows=windows_of(graph)
        )

    @classmethod
    def of_session(cls, session: onnxruntime.InferenceSession) -> Interface:
        """Read the interface of an onnxruntime session; see :meth:`of_ports` for the errors."""
        metadata = session.get_modelmeta().custom_metadata_map
        ports = map(port_of_node, session.get_inputs()), map(port_of_node, session.get_outputs())
        return cls.of_ports(
            *ports,
            layers_from_metadata(metadata),
            pads=metadata.get(PADDING) != "none",
            windows=stated_windows(metadata),
        )

    @classmethod
    def of_ports(
        cls,
        inputs: Iterable[Port],
        outputs: Iterable[Port],
        layers: tuple[PagedLayer, ...] = (),
        *,
        pads: bool = True,
        windows: Mapping[str, int] | None = None,
    ) -> Interface:
        """Sort inputs and outputs into their roles; ``layers``, ``pads`` and ``windows`` are those of the interface.

        Raises:
            InputError: a name is missing, or the graph has an input that no language model has.
        """
        ins, outs = {port.name: port for port in inputs}, {port.name: port for port in outputs}
        caches = {name: port for name in ins if (port := past_port(name)) is not None}
        past, present = tuple(caches), tuple(port.present for port in caches.values())
        _check_names(ins, outs, past, present)
        _check_pages(ins, past, layers)
        return cls(ins, outs, past, present, layers, pads, windows or {})

    @property
    def has_pages(self) -> bool:
        """Whether the caches lie in pages, which the caller allocates and the graph fills."""
        return bool(self.layers)

    @property
    def has_shared_pool(self) -> bool:
        """Whether rows share a pool of blocks, and their tokens stand one behind the other."""
        return BLOCK_TABLE in self.inputs

    @property
    def source(self) -> tuple[str, ...]:
        """The inputs that hold what an encoder made of the source; none of a model without one."""
        return tuple(name for name in self.inputs if is_source_port(name))

    @property
    def reads_embeddings(self) -> bool:
        """Whether the graph reads embeddings of tokens, which another graph makes."""
        return INPUTS_EMBEDS in self.inputs

    def check_tokens(self) -> None:
        """Refuse a graph that reads embeddings, where only tokens are at hand.

        Raises:
            InputError: it does.
        """
        if self.reads_embeddings:
            raise InputError(
                "the graph reads embeddings, which another graph makes of tokens, and this feeds it tokens alone",
                tensor=INPUTS_EMBEDS,
                remedy="give a model that reads tokens",
            )

    def position_ids(self, positions: IntArray) -> IntArray:
        """Return positions of text [batch, length] as the graph takes them: for each axis, where it has several."""
        port = self.inputs.get(POSITION_IDS)
        if port is None or len(port.shape) != 3:
            return positions
        return np.broadcast_to(positions, (port.shape[0] or 1, *positions.shape))

    @property
    def takes_padding(self) -> bool:
        """Whether rows of different length can share a batch."""
        return self.pads and (ATTENTION_MASK in self.inputs or NEW_LENGTH in self.inputs or self.has_shared_pool)

    @property
    def why_no_padding(self) -> str:
        """What to say where :attr:`takes_padding` is false."""
        has_mask = ATTENTION_MASK in self.inputs
        cause = "counts a row's tokens from its first column" if has_mask else "has no attention_mask input"
        return f"this graph {cause}, so prompts of different length cannot share a batch"

    @property
    def vocabulary(self) -> int | None:
        """Width of the logits, or ``None`` where the graph does not say."""
        shape = self.outputs[LOGITS].shape
        return shape[-1] if shape else None

    @cached_property
    def last_logits(self) -> int | None:
        """Of how many of the last positions of a call the graph makes logits, at most; ``None`` for all."""
        logits = self.outputs[LOGITS]
        return 1 if self.has_shared_pool else last_positions(logits.shape, logits.symbols)

    @property
    def gives_hidden(self) -> bool:
        """Whether the graph gives the last hidden state of each position that has logits."""
        return HIDDEN in self.outputs and not self.has_shared_pool

    @property
    def reach(self) -> int | None:
        """Where positions are unbounded, the tokens that a query reads at most."""
        is_bounded = not self.layers or any(not layer.has_unbounded_positions for layer in self.layers)
        return None if is_bounded else max(layer.reach for layer in self.layers)

    def empty_past(self, batch: int, room: int = 0) -> dict[str, Array]:
        """Return a cache without tokens for ``batch`` sequences, by input name; one that grows has the length 0.

        Args:
            batch: number of sequences.
            room: tokens per row that caches in pages must have room for; others grow by themselves.

        Raises:
            InputError: the graph does not state the number of KV heads or the head size.
        """
        if self.has_pages:
            return self.recurrent_states(batch) | {
                layer.port(state): tensor.zeros()
                for layer in self.layers
                for state, tensor in layer.states(batch, max(1, -(-room // layer.attributes.page))).items()
            }
        caches: dict[str, Array] = {}
        for name in self.past:
            port = self.inputs[name]
            if name in self.recurrent:
                continue
            if self.has_shared_pool:
                blocks = batch * max(1, -(-room // int(str(port.shape[1]))))
                caches[name] = np.zeros((blocks, *(int(str(size)) for size in port.shape[1:])), port.dtype)
                continue
            if len(port.shape) != 4 or port.shape[1] is None or port.shape[3] is None or port.dtype is None:
                raise InputError(
                    "a cache input must state its KV heads and head size", tensor=name, shape=list(port.shape)
                )
            caches[name] = np.zeros((batch, port.shape[1], self.windows.get(name, 0), port.shape[3]), port.dtype)
        return caches | self.recurrent_states(batch)

    @cached_property
    def recurrent(self) -> tuple[str, ...]:
        """Names of the state inputs whose size does not depend on the tokens, in the order of the graph."""
        return tuple(name for name in self.past if (port := past_port(name)) is not None and port.is_recurrent)

    def recurrent_states(self, batch: int) -> dict[str, Array]:
        """Return the recurrent states of ``batch`` sequences without tokens, by input name: zeros.

        Raises:
            InputError: the graph does not state their sizes.
        """
        ports = [self.inputs[name] for name in self.recurrent]
        return {port.name: np.zeros((batch, *_fixed_sizes(port)), port.dtype) for port in ports}

    def feeds(
        self, input_ids: IntArray, attention_mask: IntArray, past: Mapping[str, Array], *, needs_mask: bool = True
    ) -> dict[str, Array]:
        """Return what to feed for one step, but for the embeddings of a graph that reads them.

        Args:
            input_ids: the new tokens, [batch, length].
            attention_mask: 1 for a real token, 0 for padding, [batch, past + length].
            past: the caches by input name, as from :meth:`empty_past` or an earlier step.
            needs_mask: whether a 0 in ``attention_mask`` must be obeyed; a graph without that input refuses it.

        Raises:
            InputError: there is padding, and the graph has no ``attention_mask``; or it has lengths instead, and the
                new tokens of a row do not stand at its end.
        """
        if not self.takes_padding and needs_mask and not attention_mask.all():
            raise InputError(self.why_no_padding, remedy="run the prompts one by one, or optimize the model first")
        if self.has_shared_pool:
            blocks = next(len(pool) for name, pool in past.items() if name not in self.recurrent)
            return {**_pool_feeds(input_ids, attention_mask, blocks), **past}
        positions = np.maximum(attention_mask.cumsum(-1) - 1, 0)[:, -input_ids.shape[1] :]
        feeds: dict[str, Array] = {
            INPUT_IDS: input_ids,
            ATTENTION_MASK: attention_mask,
            POSITION_IDS: self.position_ids(positions),
            **past,
        }
        if self.has_pages:
            feeds |= _lengths(attention_mask, input_ids.shape[1])
        return {name: np.ascontiguousarray(value) for name, value in feeds.items() if name in self.inputs}


def _fixed_sizes(port: Port) -> list[int]:
    """Return the sizes of a recurrent state behind its batch.

    Raises:
        InputError: the graph does not state one of them, or the type.
    """
    sizes = [size for size in port.shape[1:] if size is not None]
    if port.dtype is None or len(sizes) + 1 != len(port.shape):
        raise InputError(
            "a recurrent state must state its type, and each of its sizes but the batch",
            tensor=port.name,
            shape=list(port.shape),
        )
    return sizes


def is_source_port(name: str) -> bool:
    """Return whether an input holds what an encoder made of the source, which stays the same for all steps."""
    return name == ENCODER_MASK or is_cross_port(name)


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
    return {PAST_LENGTH: past, NEW_LENGTH: new_lengths(attention_mask[:, -length:])}


def _pool_feeds(input_ids: IntArray, attention_mask: IntArray, blocks: int) -> dict[str, Array]:
    """Return tokens one behind the other, their lengths, and a table that gives each row the same number of blocks."""
    batch, length = input_ids.shape
    lengths = _lengths(attention_mask, length)
    return {
        INPUT_IDS: input_ids[attention_mask[:, -length:] == 1],
        STARTS: np.concatenate(([0], lengths[NEW_LENGTH].cumsum())).astype(np.int32),
        PAST_LENGTHS: lengths[PAST_LENGTH].astype(np.int32),
        BLOCK_TABLE: np.arange(batch * (blocks // batch), dtype=np.int32).reshape(batch, -1),
    }


def _check_names(
    inputs: Mapping[str, Port], outputs: Mapping[str, Port], past: Sequence[str], present: Sequence[str]
) -> None:
    """Refuse a graph that lacks a port of a language model, or has an input that none has."""
    tokens = INPUTS_EMBEDS if INPUTS_EMBEDS in inputs else INPUT_IDS
    for name, ports in ((tokens, inputs), (LOGITS, outputs), *((name, outputs) for name in present)):
        if name not in ports:
            raise InputError(
                f"the graph has no {'input' if ports is inputs else 'output'} of this name",
                tensor=name,
                remedy=f"it has {', '.join(ports)}; export it with `graphopt export`, or rename it",
            )
    unknown = [name for name in inputs if name not in _INPUTS and name not in past and not is_source_port(name)]
    if unknown:
        raise InputError(
            "the graph has an input that graphopt does not know how to feed",
            tensor=unknown[0],
            remedy="known are input_ids, attention_mask, position_ids and past_key_values.N.key/.value"
            "/.indexer_key/.conv_state/.recurrent_state",
        )


def _check_pages(inputs: Mapping[str, Port], past: Sequence[str], layers: Sequence[PagedLayer]) -> None:
    """Refuse a graph whose caches are not what its layers say."""
    described_ports = {name for layer in layers for name in layer.ports}
    state_ports = {name for name in past if (port := past_port(name)) is not None and port.part in STATES}
    growing = {name for name in past if (port := past_port(name)) is not None and not port.is_recurrent} - state_ports
    odd = sorted((described_ports ^ state_ports) | (growing if described_ports else set()))
    odd += [name for name in _LENGTHS if (name in inputs) != bool(described_ports)]
    if odd:
        raise InputError(
            "the graph's caches in pages are not what its metadata says",
            tensor=odd[0],
            remedy="make the model again with `graphopt optimize`; other tools may drop its metadata",
        )
