"""Causal language models: tokens in, logits of the next token out, with caches of keys and values or without."""

from __future__ import annotations

import importlib
import inspect
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from graphopt.analysis.structure.ports import (
    ATTENTION_MASK,
    INPUT_IDS,
    INPUTS_EMBEDS,
    LOGITS,
    PREVIOUS_HIDDEN,
    is_cross_port,
    past_port,
)
from graphopt.tasks.base import Call, Task, classes_of, random_padding, upper
from graphopt.tasks.causal_lm.interface import Interface
from graphopt.tasks.causal_lm.probe import CausalProbe
from graphopt.tasks.image_inputs import images_of_class
from graphopt.tasks.ports import class_rank

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping
    from pathlib import Path

    import onnx_ir as ir

    from graphopt.graph.diagnostics import Fact
    from graphopt.tasks.ports import Array, IntArray


class CausalLM(Task):
    """See :class:`graphopt.tasks.causal_lm.interface.Interface` for the ports."""

    name: ClassVar[str] = "causal_lm"
    noun: ClassVar[str] = "a causal language model"
    quantity: ClassVar[str] = "logits"
    output: ClassVar[str] = LOGITS
    caches: ClassVar[bool] = True
    generates: ClassVar[bool] = True
    auto_class: ClassVar[str] = "AutoModelForCausalLM"

    def matches(self, inputs: Collection[str], outputs: Collection[str]) -> bool:
        """See :class:`Task`."""
        is_alone = class_rank(inputs, outputs) is None and not any(map(is_cross_port, inputs))
        is_alone = is_alone and not {INPUTS_EMBEDS, PREVIOUS_HIDDEN} & set(inputs)
        has_cache = any(past_port(name) is not None for name in inputs)
        return is_alone and (has_cache or (INPUT_IDS in inputs and LOGITS in outputs))

    def check(self, graph: ir.Graph) -> None:
        """See :class:`Task`."""
        Interface.of_graph(graph)

    def probe(self, graph: ir.Graph, *, context: int = 0) -> CausalProbe:
        """See :class:`Task`."""
        return CausalProbe.draw(Interface.of_graph(graph), context=context)

    def text_feeds(self, graph: ir.Graph, input_ids: IntArray) -> Mapping[str, Array]:
        """See :class:`Task`."""
        interface, (batch, length) = Interface.of_graph(graph), input_ids.shape
        return interface.feeds(input_ids, np.ones_like(input_ids), interface.empty_past(batch, length))

    def calls(self, graph: ir.Graph, sizes: Iterable[tuple[int, int, int]]) -> Iterator[Call]:
        """See :class:`Task`."""
        interface, random = Interface.of_graph(graph), np.random.default_rng(0)
        for batch, length, past in sizes:
            mask = np.ones((batch, past + length), np.int64)
            if ATTENTION_MASK in interface.inputs:
                mask = random_padding(batch, past + length, random)
            thin = {name: np.zeros((batch, 1, past, 1), interface.inputs[name].dtype) for name in interface.past}
            thin |= interface.recurrent_states(batch)
            feeds = interface.feeds(random.integers(0, 2, (batch, length)), mask, thin, needs_mask=False)
            yield Call(feeds, length, past, mask.astype(bool))

    def takes_config(self, config: Any, transformers: Any) -> bool:
        """Take what ``architectures`` name causal; without names, what can be causal and fills in no masked words."""
        if getattr(config, "is_encoder_decoder", False):
            return False
        if _class_of_text_part(config, transformers) is not None:
            return True
        causal = classes_of(type(config), transformers.MODEL_FOR_CAUSAL_LM_MAPPING)
        names = getattr(config, "architectures", None)
        if not names:
            return bool(causal) and type(config) not in transformers.MODEL_FOR_MASKED_LM_MAPPING
        with_images = classes_of(type(config), transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING).intersection(names)
        # Those that have graphs for images are of another kind; of others the text alone is taken.
        if any(images_of_class(getattr(transformers, name, None)) is not None for name in with_images):
            return False
        return bool(causal.intersection(names))

    def class_of(self, config: Any, transformers: Any) -> Any:
        """See :class:`Task`."""
        return _class_of_text_part(config, transformers) or super().class_of(config, transformers)

    def export_parts(self, model: Any, source: str) -> tuple[Any, dict[str, Any]]:
        """Return the part of a model that takes several new tokens and a cache, and inputs for it.

        Raises:
            InputError: a state of the model is neither a key-value cache nor a recurrent state.
        """
        transformers = importlib.import_module("transformers")
        decompose = importlib.import_module("transformers.exporters.utils").decompose_for_generation
        # A checkpoint's own settings (beams, static caches, sampling) would change what is traced.
        model.generation_config = transformers.GenerationConfig(do_sample=False, use_cache=True, pad_token_id=0)
        sample = self.sample(model)
        module, inputs = decompose(model, sample, multi_token_decode=True)["decode"]
        if inputs.get(ATTENTION_MASK) is None and ATTENTION_MASK in inspect.signature(model.forward).parameters:
            # A model without attention drops it, and its recurrences must not read padding.
            ids, prompt = inputs[INPUT_IDS], sample[ATTENTION_MASK]
            inputs[ATTENTION_MASK] = prompt.new_ones(len(ids), prompt.shape[1] + ids.shape[1])
        upper("graphopt.models.states:confirm_caches")(inputs, source)
        return module, inputs

    def why_no_genai(self) -> Fact | None:
        """See :class:`Task`: where a graph cannot be run there, its ports say so."""
        return None

    def measure_quality(self, reference: Any, artifact: Path, **reading: Any) -> dict[str, float]:
        """Compare logits on text."""
        figures: dict[str, float] = upper("graphopt.quality.judge:text_quality")(reference, artifact, **reading)
        return figures

    def describe_quality(self, verdict: str, figures: Mapping[str, float]) -> Fact:
        """See :class:`Task`."""
        fact: Fact = upper("graphopt.quality.judge:describe_text_quality")(verdict, figures)
        return fact


def _class_of_text_part(config: Any, transformers: Any) -> Any:
    """Return the causal class that a text part is of which was saved alone, or ``None``.

    ``AutoModelForCausalLM`` knows some such classes by the configuration of the whole model only (Emu3, Mllama).
    """
    if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    modeling_auto = importlib.import_module("transformers.models.auto.modeling_auto")
    names = set(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    architectures = names.intersection(getattr(config, "architectures", None) or ())
    classes = (getattr(transformers, name, None) for name in sorted(architectures))
    return next((kind for kind in classes if getattr(kind, "config_class", None) is type(config)), None)


CAUSAL_LM = CausalLM()
