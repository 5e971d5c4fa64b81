"""The names of a graph's inputs and outputs, and the grammar of cache names: the one place that spells them.

A cache of layer N comes in as ``past_key_values.N.PART`` and goes out as ``present.N.PART``. The part is ``key`` or
``value`` of a cache that grows or whose blocks requests share, :data:`INDEXER` or one of :data:`SCALES` beside it, one
of :data:`STATES` of a cache in pages, or one of :data:`RECURRENT`. :mod:`graphopt.verification.certificate` spells
these names on its own, since it shares nothing with what it checks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphopt.runtime_ops import Role
from graphopt.runtime_ops.kv_attention.spec.schema import SCHEMA

if TYPE_CHECKING:
    import onnx_ir as ir

INPUT_IDS, ATTENTION_MASK, POSITION_IDS = "input_ids", "attention_mask", "position_ids"
TOKEN_TYPE_IDS = "token_type_ids"
PAST_LENGTH, NEW_LENGTH = "past_length", "new_length"
STARTS, PAST_LENGTHS, BLOCK_TABLE = "cumulative_sequence_lengths", "past_sequence_lengths", "block_table"
ENCODER_MASK, INPUT_FEATURES, ENCODER_STATES = "encoder_attention_mask", "input_features", "encoder_hidden_states"
PIXEL_VALUES, PIXEL_MASK, INPUT_VALUES = "pixel_values", "pixel_mask", "input_values"
INPUTS_EMBEDS, IMAGE_FEATURES, IMAGE_GRID = "inputs_embeds", "image_features", "image_grid_thw"
FEATURE_INDEX, FEATURE_WEIGHT = "feature_index", "feature_weight"
LOGITS, HIDDEN, POOLER_OUTPUT = "logits", "last_hidden_state", "pooler_output"
PREVIOUS_HIDDEN = "previous_hidden_state"

POOL = "ai.graphopt.pool"
"""Key of the model's metadata that says how large the pool of blocks is that requests share, as JSON."""

MAX_POSITIONS = "ai.graphopt.max_positions"
"""Key of the model's metadata that says how many tokens a sequence may have, where a pass changed that."""

GROWING = ("key", "value")
"""The parts of a cache that grows."""

INDEXER = "indexer_key"
"""Keys that grow too, [batch, 1, past, size]: a trained indexer chooses by them which tokens attention reads."""

SCALES = ("key_scale", "value_scale")
"""The scales of tokens in blocks of integers that requests share."""

STATES = SCHEMA.of_role(Role.STATE)
"""The parts of a cache in pages: the state tensors of ``KVAttention``, in order."""

RECURRENT = ("conv_state", "recurrent_state")
"""The parts of fixed size: the tail of a convolution and the state of a recurrence; a layer's second has ``_1``."""

_PAST, _PRESENT = "past_key_values", "present"
_RECURRENT = rf"(?:{'|'.join(RECURRENT)})(?:_\d+)?"
_PARTS = (*GROWING, INDEXER, *SCALES, *STATES)
_NAME = re.compile(rf"({_PAST}|{_PRESENT})\.(\d+)\.({'|'.join(_PARTS)}|{_RECURRENT})")
# Keys and values of the text that a decoder looks back at: an output of the encoder, and an input of the decoder.
_CROSS = "cross_key_values"
_CROSS_NAME = re.compile(rf"{_CROSS}\.(\d+)\.({'|'.join(GROWING)})")
# How transformers' exporter names caches; it names the side only where both sides have the name.
_EXPORTER_NAME = re.compile(
    r"(?:(input|output)\.)?(?:past_key_values|cache_params)\.(?:(?:self|(cross))_attention_cache\.)?layers\.(\d+)\."
    rf"(?:({'|'.join((*GROWING, INDEXER))})s|({'|'.join(RECURRENT)})s\.(\d+))"
)


@dataclass(frozen=True)
class CachePort:
    """One tensor of a layer's cache.

    Attributes:
        layer: N in ``past_key_values.N.key``.
        part: one of :data:`GROWING`, :data:`SCALES`, :data:`STATES` or :data:`RECURRENT`, or :data:`INDEXER`.
    """

    layer: int
    part: str

    @property
    def past(self) -> str:
        """The input that takes it."""
        return f"{_PAST}.{self.layer}.{self.part}"

    @property
    def present(self) -> str:
        """The output that gives it back."""
        return f"{_PRESENT}.{self.layer}.{self.part}"

    @property
    def grows(self) -> bool:
        """Whether the cache grows by each call, and does not lie in pages."""
        return self.part in (*GROWING, INDEXER)

    @property
    def is_recurrent(self) -> bool:
        """Whether the state has a size of its own, however many tokens it was made of."""
        return re.fullmatch(_RECURRENT, self.part) is not None


def token_port(graph: ir.Graph) -> ir.Value | None:
    """Return the input that has a place for each new token: ``input_ids``, or their embeddings; ``None`` without."""
    return next((value for value in graph.inputs if value.name in (INPUT_IDS, INPUTS_EMBEDS)), None)


def past_port(value: ir.Value | str | None) -> CachePort | None:
    """Return which cache an input called so takes, or ``None``."""
    return _port(value, _PAST)


def present_port(value: ir.Value | str | None) -> CachePort | None:
    """Return which cache an output called so gives back, or ``None``."""
    return _port(value, _PRESENT)


def genai_cross_pattern(part: str) -> str:
    """Return the port of a part of cross-attention for all layers, with ``%d`` for N as onnxruntime-genai writes it."""
    return f"{_CROSS}.%d.{part}"


def is_cross_port(name: str) -> bool:
    """Return whether a port holds keys or values of cross-attention, which an encoder makes and a decoder reads."""
    return _CROSS_NAME.fullmatch(name) is not None


def exported_name(name: str) -> str | None:
    """Return our name of a cache that transformers' exporter calls ``name``; ``None`` if it names no cache.

    ``input.past_key_values.layers.0.keys`` is ``past_key_values.0.key``, with ``output`` it is ``present.0.key``;
    ``layers.0.conv_states.0`` ends in ``0.conv_state``, ``layers.0.indexer_keys`` in ``0.indexer_key``. Those of
    cross-attention are ``cross_key_values.0.key`` on both sides.
    """
    match = _EXPORTER_NAME.fullmatch(name)
    if match is None:
        return None
    if match[2] is not None:
        return f"{_CROSS}.{match[3]}.{match[4]}"
    number = int(match[6] or 0)
    port = CachePort(int(match[3]), match[4] or match[5] + (f"_{number}" if number else ""))
    return port.present if match[1] == "output" else port.past


def genai_pattern(part: str) -> tuple[str, str]:
    """Return the input and the output of a part for all layers, with ``%d`` for N as onnxruntime-genai writes it."""
    return f"{_PAST}.%d.{part}", f"{_PRESENT}.%d.{part}"


def _port(value: ir.Value | str | None, side: str) -> CachePort | None:
    name = value if isinstance(value, str) or value is None else value.name
    match = _NAME.fullmatch(name or "")
    return CachePort(int(match[2]), match[3]) if match is not None and match[1] == side else None
