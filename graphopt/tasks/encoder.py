"""Encoders, as BERT is one: all tokens of a text in, a hidden state for each out, no cache.

A decoder without its head is one too, and so are the encoder of T5 and the text tower of CLIP.

Inputs: ``input_ids`` int64 [batch, length], optional ``attention_mask``, ``token_type_ids`` and ``position_ids`` of the
same shape. Outputs: ``last_hidden_state`` [batch, length, width], and perhaps ``pooler_output`` [batch, width], and
perhaps one of :data:`EMBEDDINGS` [batch, numbers], which is the embedding of a text as the graph makes it.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from graphopt.analysis.structure.ports import (
    ATTENTION_MASK,
    HIDDEN,
    INPUT_IDS,
    INPUT_VALUES,
    LOGITS,
    PIXEL_VALUES,
    POSITION_IDS,
    TOKEN_TYPE_IDS,
    past_port,
)
from graphopt.analysis.structure.products import token_lookups
from graphopt.errors import InputError
from graphopt.graph.diagnostics import Fact, Rule
from graphopt.ort.session import run
from graphopt.tasks.base import BATCH, LENGTH, PADDING, Call, Floats, Probe, Task, classes_of, random_padding, upper
from graphopt.tasks.causal_lm import CAUSAL_LM
from graphopt.tasks.ports import Array, IntArray, Port, port_of_node, port_of_value

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping
    from pathlib import Path

    import onnx_ir as ir
    import onnxruntime

TOKENS = Rule("encoder.tokens", "{batch} x {length} random tokens with padding")
NO_TEXT = Rule("encoder.no-text", "an encoder makes hidden states, and onnxruntime-genai makes text")

EMBEDDINGS = ("text_embeds", "sentence_embedding")
"""Outputs that hold the embedding of a whole text: of CLIP's text tower, and of exports of sentence-transformers."""

_CACHE_SWITCH = "use_cache"
_INPUTS = (INPUT_IDS, ATTENTION_MASK, TOKEN_TYPE_IDS, POSITION_IDS)


@dataclass(frozen=True)
class EncoderInterface:
    """How an encoder is fed and read.

    Attributes:
        inputs: all inputs, by name.
        outputs: all outputs, by name.
    """

    inputs: Mapping[str, Port]
    outputs: Mapping[str, Port]

    @classmethod
    def of_graph(cls, graph: ir.Graph, output: str = HIDDEN) -> EncoderInterface:
        """Read the interface of ``graph``; see :meth:`of_ports` for the errors."""
        return cls.of_ports(map(port_of_value, graph.inputs), map(port_of_value, graph.outputs), output)

    @classmethod
    def of_session(cls, session: onnxruntime.InferenceSession, output: str = HIDDEN) -> EncoderInterface:
        """Read the interface of an onnxruntime session; see :meth:`of_ports` for the errors."""
        return cls.of_ports(map(port_of_node, session.get_inputs()), map(port_of_node, session.get_outputs()), output)

    @classmethod
    def of_ports(cls, inputs: Iterable[Port], outputs: Iterable[Port], output: str = HIDDEN) -> EncoderInterface:
        """Sort inputs and outputs by name.

        Raises:
            InputError: ``input_ids`` or ``output`` is missing, or an input is not known.
        """
        interface = cls({port.name: port for port in inputs}, {port.name: port for port in outputs})
        for name, ports, kind in ((INPUT_IDS, interface.inputs, "input"), (output, interface.outputs, "output")):
            if name not in ports:
                raise InputError(
                    f"the graph has no {kind} of this name",
                    tensor=name,
                    remedy=f"it has {', '.join(ports)}; export it with `graphopt export`, or rename it",
                )
        unknown = [name for name in interface.inputs if name not in _INPUTS]
        if unknown:
            raise InputError(
                "the graph has an input that graphopt does not know how to feed",
                tensor=unknown[0],
                remedy=f"known inputs of an encoder are {', '.join(_INPUTS)}",
            )
        return interface

    @property
    def width(self) -> int | None:
        """Numbers of a hidden state, or ``None`` where the graph does not say."""
        shape = self.outputs[HIDDEN].shape
        return shape[-1] if shape else None

    @property
    def embedding(self) -> str | None:
        """The output that holds the embedding of a text; ``None`` where hidden states are to be pooled."""
        return next((name for name in EMBEDDINGS if name in self.outputs), None)

    @property
    def takes_padding(self) -> bool:
        """Whether texts of different length can share a batch."""
        return ATTENTION_MASK in self.inputs

    def feeds(
        self,
        input_ids: IntArray,
        attention_mask: IntArray,
        token_types: IntArray | None = None,
        *,
        needs_mask: bool = True,
    ) -> dict[str, Array]:
        """Return what to feed.

        Args:
            input_ids: the tokens, [batch, length].
            attention_mask: 1 for a real token, 0 for padding, [batch, length].
            token_types: 1 for a token of the second text of a pair, [batch, length]; ``None`` for one text.
            needs_mask: whether a 0 in ``attention_mask`` must be obeyed; a graph without that input refuses it.

        Raises:
            InputError: there is padding, and the graph has no ``attention_mask``.
        """
        if needs_mask and not self.takes_padding and not attention_mask.all():
            raise InputError(
                f"this graph has no {ATTENTION_MASK} input, so texts of different length cannot share a batch",
                remedy="run the texts one by one",
            )
        positions = np.broadcast_to(np.arange(input_ids.shape[1]), input_ids.shape)
        arrays = {
            INPUT_IDS: input_ids,
            ATTENTION_MASK: attention_mask,
            TOKEN_TYPE_IDS: np.zeros_like(input_ids) if token_types is None else token_types,
            POSITION_IDS: positions,
        }
        return {name: np.ascontiguousarray(arrays[name], port.dtype or np.int64) for name, port in self.inputs.items()}


@dataclass(frozen=True)
class EncoderProbe:
    """Random tokens [batch, length]; the first row ends with padding where the graph has a mask.

    Attributes:
        feeds: all inputs; see :class:`graphopt.tasks.base.Probe`.
        real: bool [batch, length], which columns are tokens.
    """

    feeds: Mapping[str, Array]
    real: npt.NDArray[np.bool_]

    @property
    def tokens(self) -> Fact:
        """See :class:`graphopt.tasks.base.Probe`."""
        return TOKENS(batch=BATCH, length=LENGTH)

    def run(self, session: onnxruntime.InferenceSession) -> Floats:
        """Return the hidden states of real tokens, [tokens, width]."""
        # A pass may have changed the type that the hidden states have, not how the graph is fed.
        hidden = run(session, [HIDDEN], self.feeds)[0]
        states: Floats = hidden[self.real].astype(np.float64)
        return states

    def matching_rows(self, before: Floats, after: Floats) -> Floats:
        """Return ``before``: every token keeps its hidden state."""
        del after
        return before

    def figures(self, first: Floats, after: Floats) -> dict[str, float]:
        """Return the cosines of hidden states with those of the model before any pass: their mean and the smallest."""
        return cosines_with_start(first, after)


class Encoder(Task):
    """See :class:`EncoderInterface` for the ports."""

    name: ClassVar[str] = "encoder"
    noun: ClassVar[str] = "an encoder"
    quantity: ClassVar[str] = "hidden states"
    output: ClassVar[str] = HIDDEN

    def matches(self, inputs: Collection[str], outputs: Collection[str]) -> bool:
        """See :class:`Task`."""
        if HIDDEN not in outputs or LOGITS in outputs or PIXEL_VALUES in inputs or INPUT_VALUES in inputs:
            return False
        return not any(past_port(name) is not None for name in inputs)

    def check(self, graph: ir.Graph) -> None:
        """See :class:`Task`."""
        self.interface(graph)

    def interface(self, graph: ir.Graph) -> EncoderInterface:
        """Return how ``graph`` is fed and read; see :meth:`EncoderInterface.of_ports` for the errors."""
        return EncoderInterface.of_graph(graph, self.output)

    def probe(self, graph: ir.Graph, *, context: int = 0) -> Probe:
        """See :class:`Task`; there is no cache, so ``context`` counts for nothing."""
        del context
        interface = self.interface(graph)
        ids = np.random.default_rng(0).integers(0, vocabulary_of(graph) or 2, (BATCH, LENGTH))
        mask = np.ones_like(ids)
        if ATTENTION_MASK in interface.inputs:
            mask[0, -PADDING:] = 0
        return EncoderProbe(interface.feeds(ids, mask), mask.astype(bool))

    def text_feeds(self, graph: ir.Graph, input_ids: IntArray) -> Mapping[str, Array]:
        """See :class:`Task`."""
        return self.interface(graph).feeds(input_ids, np.ones_like(input_ids))

    def calls(self, graph: ir.Graph, sizes: Iterable[tuple[int, int, int]]) -> Iterator[Call]:
        """See :class:`Task`; what would be the past is the beginning of the text."""
        interface, random = self.interface(graph), np.random.default_rng(0)
        for batch, new, past in sizes:
            length = past + new
            mask = np.ones((batch, length), np.int64)
            if ATTENTION_MASK in interface.inputs:
                mask = random_padding(batch, length, random)
            feeds = interface.feeds(random.integers(0, 2, (batch, length)), mask, needs_mask=False)
            yield Call(feeds, length, 0, mask.astype(bool))

    def takes_config(self, config: Any, transformers: Any) -> bool:
        """Take models without a head: encoders of texts, and decoders, which are embedders then.

        Of encoders also what transformers can train to fill in masked words, whose head is left out.
        """
        if getattr(config, "is_decoder", False) or CAUSAL_LM.takes_config(config, transformers):
            return False
        kind, names = type(config), set(getattr(config, "architectures", None) or ())
        if _text_encoders(config, transformers).intersection(names):
            return True
        if getattr(config, "is_encoder_decoder", False):
            return False
        bare = classes_of(kind, transformers.MODEL_MAPPING)
        if kind in transformers.MODEL_FOR_MASKED_LM_MAPPING:
            mappings = (transformers.MODEL_FOR_MASKED_LM_MAPPING, transformers.MODEL_FOR_PRETRAINING_MAPPING)
            return not names or bool(names & bare.union(*(classes_of(kind, mapping) for mapping in mappings)))
        return kind in transformers.MODEL_FOR_CAUSAL_LM_MAPPING and bool(names & bare)

    def class_of(self, config: Any, transformers: Any) -> Any:
        """Return the encoder of texts that the configuration names; else the class without a head."""
        names = _text_encoders(config, transformers).intersection(getattr(config, "architectures", None) or ())
        return getattr(transformers, names.pop()) if names else super().class_of(config, transformers)

    def sample(self, model: Any) -> dict[str, Any]:
        """Return two prompts, all of the first segment; a decoder makes no cache."""
        inputs = super().sample(model)
        parameters = inspect.signature(model.forward).parameters
        if TOKEN_TYPE_IDS in parameters:
            inputs[TOKEN_TYPE_IDS] = 0 * inputs[INPUT_IDS]
        if _CACHE_SWITCH in parameters and getattr(model.config, _CACHE_SWITCH, False):
            inputs[_CACHE_SWITCH] = False
        return inputs

    def facts(self, folder: Path) -> Any:
        """See :class:`Task`; the tokenizer bounds the positions too."""
        return upper("graphopt.artifact.hf_config:facts_of_encoder")(folder)

    def why_no_genai(self) -> Fact:
        """See :class:`Task`."""
        return NO_TEXT()

    def print_run(self, model: Any, inputs: list[str], as_json: bool) -> None:
        """Print cosines of the embeddings of texts."""
        upper("graphopt.cli.embeddings:print_embeddings")(model, inputs, as_json)

    def print_evaluation(self, model: Any, reference: Path | None, text: str, threads: int, as_json: bool) -> None:
        """Print how close embeddings are to those of a reference."""
        upper("graphopt.cli.embeddings:print_closeness")(model, reference, text, threads, as_json)

    def measure_quality(self, reference: Any, artifact: Path, **reading: Any) -> dict[str, float]:
        """Compare embeddings of sentences."""
        figures: dict[str, float] = upper("graphopt.quality.judge:embedding_quality")(reference, artifact, **reading)
        return figures

    def describe_quality(self, verdict: str, figures: Mapping[str, float]) -> Fact:
        """See :class:`Task`."""
        fact: Fact = upper("graphopt.quality.judge:describe_embedding_quality")(verdict, figures)
        return fact


ENCODER = Encoder()


def _text_encoders(config: Any, transformers: Any) -> set[str]:
    """Return the names of the classes that encode texts and no more, with a projection of the embedding or without."""
    names = classes_of(type(config), transformers.MODEL_FOR_TEXT_ENCODING_MAPPING)
    return names | {projection for name in names if hasattr(transformers, projection := f"{name}WithProjection")}


def vocabulary_of(graph: ir.Graph) -> int | None:
    """Return the rows of the table that ``input_ids`` looks up; ``None`` where none is found."""
    tables = (node.inputs[0] for node in token_lookups(graph))
    rows = (table.shape[0] for table in tables if table is not None and table.shape is not None)
    return next((row for row in rows if isinstance(row, int)), None)


def cosines_with_start(first: Floats, after: Floats) -> dict[str, float]:
    """Return the mean and the smallest cosine of rows with those of the model before any pass, [rows, width] each."""
    similarities = cosines(first, after)
    return {
        "cosine_with_start_mean": float(similarities.mean()),
        "cosine_with_start_smallest": float(similarities.min()),
    }


def cosines(a: npt.NDArray[np.floating], b: npt.NDArray[np.floating]) -> Floats:
    """Return the cosine of each row of ``a`` with the same row of ``b``, float64 [rows]; 0 where one is all zeros."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    lengths = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    products = np.einsum("ij,ij->i", a, b)
    quotients: Floats = np.divide(products, lengths, out=np.zeros_like(products), where=lengths > 0)
    return quotients
