"""The second graph of an encoder-decoder, which makes the text: a causal language model that also reads a source.

Ports are those of :class:`graphopt.tasks.causal_lm.interface.Interface`. What the encoder made of the source comes in,
and never goes out: a step appends to the keys and values of the text alone.
"""

from __future__ import annotations

import dataclasses
import importlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from graphopt.analysis.structure.ports import ATTENTION_MASK, ENCODER_MASK, is_cross_port
from graphopt.tasks.base import BATCH, PADDING, Call, classes_of, random_padding, upper
from graphopt.tasks.causal_lm import CausalLM
from graphopt.tasks.causal_lm.interface import Interface
from graphopt.tasks.causal_lm.probe import CausalProbe
from graphopt.tasks.seq2seq.encoder import DECODER_INPUT_IDS, SEQ2SEQ_ENCODER, sample_sources

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping
    from pathlib import Path

    import onnx_ir as ir

    from graphopt.graph.diagnostics import Fact
    from graphopt.tasks.base import RunPart
    from graphopt.tasks.ports import Array, IntArray

_SOURCE = 7
"""Columns of the source of a probe, unlike any number of tokens."""


@dataclass(frozen=True)
class Seq2SeqProbe(CausalProbe):
    """Random tokens behind a source.

    Attributes:
        source: what an encoder made of the source, by input name.
        encoder_feeds: what it was made of; empty where it is random.
    """

    source: Mapping[str, Array] = field(default_factory=dict)
    encoder_feeds: Mapping[str, Array] = field(default_factory=dict)

    @property
    def feeds(self) -> dict[str, Array]:
        """See :class:`CausalProbe`: the source, and the tokens of the text."""
        return {**self.encoder_feeds, DECODER_INPUT_IDS: self.input_ids}

    def other_feeds(self, rows: slice, columns: slice) -> dict[str, Array]:
        """See :class:`CausalProbe`: the same in all calls."""
        del columns
        return {name: np.ascontiguousarray(array[rows]) for name, array in self.source.items()}


class Seq2Seq(CausalLM):
    """See the module for the ports."""

    name: ClassVar[str] = "seq2seq"
    noun: ClassVar[str] = "an encoder-decoder"
    is_fallback: ClassVar[bool] = False
    auto_class: ClassVar[str] = "AutoModelForSeq2SeqLM"
    parts: ClassVar[Mapping[str, str]] = {"encoder": "seq2seq_encoder"}
    takes: ClassVar[tuple[str, ...]] = ("texts", "recordings")

    def matches(self, inputs: Collection[str], outputs: Collection[str]) -> bool:
        """See :class:`graphopt.tasks.base.Task`."""
        return self.output in outputs and any(map(is_cross_port, inputs))

    def probe(self, graph: ir.Graph, *, context: int = 0) -> Seq2SeqProbe:
        """Draw a probe with random numbers as keys and values of the source."""
        interface = Interface.of_graph(graph)
        probe = CausalProbe.draw(interface, context=context)
        return Seq2SeqProbe(**vars(probe), source=random_source(interface, BATCH, _SOURCE, np.random.default_rng(0)))

    def probe_behind(
        self, graph: ir.Graph, parts: Mapping[str, ir.Graph], run: RunPart, config: Any = None
    ) -> Seq2SeqProbe:
        """Draw a probe behind what the encoder really makes of a source."""
        del config
        (name,) = parts
        feeds = SEQ2SEQ_ENCODER.probe(parts[name]).feeds
        inputs = {value.name for value in graph.inputs}
        source = {port: array for port, array in run(name, feeds).items() if port in inputs}
        if ENCODER_MASK in inputs:
            source[ENCODER_MASK] = feeds[ATTENTION_MASK]
        return dataclasses.replace(self.probe(graph), source=source, encoder_feeds=feeds)

    def text_feeds(self, graph: ir.Graph, input_ids: IntArray) -> Mapping[str, Array]:
        """Return what to feed for whole texts, but for what the encoder makes of the source: the same texts."""
        feeds = dict(super().text_feeds(graph, input_ids))
        if any(value.name == ENCODER_MASK for value in graph.inputs):
            feeds[ENCODER_MASK] = np.ones_like(input_ids)
        return feeds

    def calls(self, graph: ir.Graph, sizes: Iterable[tuple[int, int, int]]) -> Iterator[Call]:
        """See :class:`graphopt.tasks.base.Task`."""
        interface, random = Interface.of_graph(graph), np.random.default_rng(0)
        sizes = list(sizes)
        for call, (batch, _, _) in zip(super().calls(graph, sizes), sizes, strict=True):
            source = random_source(interface, batch, _SOURCE, random)
            if ENCODER_MASK in source:
                source[ENCODER_MASK] = random_padding(batch, _SOURCE, random)
            yield dataclasses.replace(call, feeds={**call.feeds, **source})

    def takes_config(self, config: Any, transformers: Any) -> bool:
        """Take encoder-decoders that make texts of texts or of recordings."""
        if not getattr(config, "is_encoder_decoder", False):
            return False
        return bool(_heads(config, transformers).intersection(getattr(config, "architectures", None) or ()))

    def class_of(self, config: Any, transformers: Any) -> Any:
        """Return the class that the configuration names."""
        return getattr(transformers, _heads(config, transformers).intersection(config.architectures).pop())

    def sample(self, model: Any) -> dict[str, Any]:
        """Return two sources and two tokens of each text."""
        return sample_sources(model)

    def export_parts(self, model: Any, source: str) -> tuple[Any, dict[str, Any]]:
        """Return the model as it runs behind a source and a past of four tokens, with two new ones."""
        del source
        torch = importlib.import_module("torch")
        outputs = importlib.import_module("transformers.modeling_outputs")
        inputs = self.sample(model)
        ids = torch.cat([inputs.pop(DECODER_INPUT_IDS)] * 2, dim=1)
        with torch.no_grad():
            first = model(**inputs, decoder_input_ids=ids, use_cache=True)
        feeds = {
            **({ATTENTION_MASK: inputs[ATTENTION_MASK]} if ATTENTION_MASK in inputs else {}),
            DECODER_INPUT_IDS: ids[:, :2],
            "encoder_outputs": outputs.BaseModelOutput(last_hidden_state=first.encoder_last_hidden_state),
            "past_key_values": first.past_key_values,
            "use_cache": True,
        }
        return model, feeds

    def facts(self, folder: Path) -> Any:
        """See :class:`graphopt.tasks.base.Task`; how a text begins, and which tokens it never has."""
        return upper("graphopt.artifact.hf_config:facts_of_seq2seq")(folder)

    def measure_quality(self, reference: Any, artifact: Path, **reading: Any) -> dict[str, float]:
        """Compare logits of texts behind sources."""
        figures: dict[str, float] = upper("graphopt.quality.seq2seq:seq2seq_quality")(reference, artifact, **reading)
        return figures

    def describe_quality(self, verdict: str, figures: Mapping[str, float]) -> Fact:
        """See :class:`graphopt.tasks.base.Task`."""
        fact: Fact = upper("graphopt.quality.seq2seq:describe_source_quality")(verdict, figures)
        return fact

    def print_evaluation(self, model: Any, reference: Path | None, text: str, threads: int, as_json: bool) -> None:
        """Print how close the logits of texts are to those of a reference."""
        upper("graphopt.cli.seq2seq:print_text_agreement")(model, reference, text, threads, as_json)


def _heads(config: Any, transformers: Any) -> set[str]:
    mappings = (transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, transformers.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING)
    return set().union(*(classes_of(type(config), mapping) for mapping in mappings))


def random_source(interface: Interface, batch: int, columns: int, random: np.random.Generator) -> dict[str, Array]:
    """Return random keys and values of a source, and its mask: the first row ends with padding."""
    arrays: dict[str, Array] = {}
    for name in interface.source:
        port = interface.inputs[name]
        if name == ENCODER_MASK:
            mask = np.ones((batch, columns), np.int64)
            mask[0, -PADDING:] = 0
            arrays[name] = mask
            continue
        _, heads, length, size = port.shape
        numbers = random.standard_normal((batch, heads or 1, length or columns, size or 1))
        arrays[name] = numbers.astype(port.dtype or np.float32)
    return arrays


SEQ2SEQ = Seq2Seq()
