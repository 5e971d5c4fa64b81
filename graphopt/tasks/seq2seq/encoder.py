"""The first graph of an encoder-decoder: a source in, the keys and values that all decoder layers read of it out.

Inputs: ``input_ids`` and ``attention_mask`` int64 [batch, length] of a text, or ``input_features`` [batch, bands,
frames] of a recording. Outputs: for each layer N of the decoder ``cross_key_values.N.key`` and ``.value`` [batch,
heads, length, head size]. They are computed once for a source. The last hidden states of a text stay inside, so that
their basis is free; those of a recording are the output ``encoder_hidden_states``, which onnxruntime-genai wants.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from graphopt.analysis.structure.ports import ATTENTION_MASK, ENCODER_STATES, INPUT_FEATURES, is_cross_port
from graphopt.errors import InputError
from graphopt.graph.diagnostics import Fact, Rule
from graphopt.ort.session import run
from graphopt.tasks.base import BATCH, LENGTH, Call, Floats, Probe, sample_tokens
from graphopt.tasks.encoder import Encoder, EncoderInterface, EncoderProbe
from graphopt.tasks.ports import Port, port_of_node, port_of_value

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    import onnx_ir as ir
    import onnxruntime

    from graphopt.tasks.ports import Array, IntArray

FEATURES = Rule("seq2seq.features", "{batch} recordings of noise")

DECODER_INPUT_IDS = "decoder_input_ids"


@dataclass(frozen=True)
class SourceProbe(EncoderProbe):
    """Random tokens, or noise; what is compared are all keys and values of cross-attention, side by side."""

    @property
    def tokens(self) -> Fact:
        """See :class:`graphopt.tasks.base.Probe`."""
        return FEATURES(batch=BATCH) if INPUT_FEATURES in self.feeds else super().tokens

    def run(self, session: onnxruntime.InferenceSession) -> Floats:
        """Return keys and values of the columns that are no padding, [columns, layers x heads x head size x 2]."""
        names = [port.name for port in session.get_outputs() if is_cross_port(port.name)]
        outputs = run(session, names, self.feeds)
        real = self.real if ATTENTION_MASK in self.feeds else np.ones((BATCH, outputs[0].shape[2]), bool)
        columns = [array.transpose(0, 2, 1, 3)[real].reshape(real.sum(), -1) for array in outputs]
        states: Floats = np.concatenate(columns, axis=-1).astype(np.float64)
        return states


class Seq2SeqEncoder(Encoder):
    """See the module for the ports."""

    name: ClassVar[str] = "seq2seq_encoder"
    noun: ClassVar[str] = "the encoder of an encoder-decoder"
    quantity: ClassVar[str] = "cross-attention states"
    output: ClassVar[str] = "cross_key_values.0.key"

    def matches(self, inputs: Collection[str], outputs: Collection[str]) -> bool:
        """See :class:`graphopt.tasks.base.Task`."""
        del inputs
        return any(map(is_cross_port, outputs)) and all(
            is_cross_port(name) or name == ENCODER_STATES for name in outputs
        )

    def takes_config(self, config: Any, transformers: Any) -> bool:
        """Take none: the configuration is of the whole model."""
        del config, transformers
        return False

    def check(self, graph: ir.Graph) -> None:
        """See :class:`graphopt.tasks.base.Task`."""
        if features_of(graph) is None:
            self.interface(graph)

    def interface(self, graph: ir.Graph) -> EncoderInterface:
        """See :class:`Encoder`."""
        return EncoderInterface.of_graph(graph, graph.outputs[0].name or "")

    def probe(self, graph: ir.Graph, *, context: int = 0) -> Probe:
        """See :class:`graphopt.tasks.base.Task`."""
        port = features_of(graph)
        if port is None:
            probe = super().probe(graph, context=context)
            return SourceProbe(probe.feeds, probe.real)
        _, bands, frames = port.shape
        noise = np.random.default_rng(0).standard_normal((BATCH, bands or 1, frames or LENGTH))
        return SourceProbe({INPUT_FEATURES: noise.astype(port.dtype or np.float32)}, np.ones((BATCH, 1), bool))

    def text_feeds(self, graph: ir.Graph, input_ids: IntArray) -> Mapping[str, Array]:
        """See :class:`graphopt.tasks.base.Task`.

        Raises:
            InputError: the source is a recording.
        """
        if features_of(graph) is not None:
            raise InputError(
                "the encoder reads recordings, and statistics are collected on text",
                tensor=INPUT_FEATURES,
                remedy="take a recipe that rounds to nearest, such as int4-rtn",
            )
        return super().text_feeds(graph, input_ids)

    def calls(self, graph: ir.Graph, sizes: Iterable[tuple[int, int, int]]) -> Iterator[Call]:
        """See :class:`graphopt.tasks.base.Task`; of recordings none, which have no mask."""
        return iter(()) if features_of(graph) is not None else super().calls(graph, sizes)

    def sample(self, model: Any) -> dict[str, Any]:
        """Return two sources and the first token of their texts."""
        return sample_sources(model)

    def export_parts(self, model: Any, source: str) -> tuple[Any, dict[str, Any]]:
        """Return the whole model, whose first run makes the keys and values of the source."""
        del source
        return model, self.sample(model) | {"use_cache": True}


def recordings_port(nodes: Iterable[onnxruntime.NodeArg]) -> Port | None:
    """Return the input of a session that takes a recording; ``None`` where the source is a text."""
    return next((port_of_node(node) for node in nodes if node.name == INPUT_FEATURES), None)


def features_of(graph: ir.Graph) -> Port | None:
    """Return the input that takes a recording; ``None`` where the source is a text."""
    return next((port_of_value(value) for value in graph.inputs if value.name == INPUT_FEATURES), None)


def sample_sources(model: Any) -> dict[str, Any]:
    """Return two sources, texts or recordings, with two tokens of the decoder each, torch tensors by name."""
    tokens = sample_tokens(model)
    ids = tokens["input_ids"]
    if model.main_input_name != INPUT_FEATURES:
        return tokens | {DECODER_INPUT_IDS: ids[:, :2]}
    config = model.config
    strides = [module.stride[0] for module in model.get_encoder().children() if hasattr(module, "stride")]
    frames = config.max_source_positions * int(np.prod(strides))
    noise = ids.new_zeros((len(ids), config.num_mel_bins, frames)).float().normal_()
    return {INPUT_FEATURES: noise, DECODER_INPUT_IDS: ids[:, :2]}


SEQ2SEQ_ENCODER = Seq2SeqEncoder()
