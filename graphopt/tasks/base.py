"""What kind of model a graph is: how it is recognized, fed, and compared with what it was."""

from __future__ import annotations

import abc
import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import numpy as np
import numpy.typing as npt

from graphopt.analysis.structure.ports import ATTENTION_MASK, INPUT_IDS
from graphopt.errors import InputError
from graphopt.graph.diagnostics import Rule

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
    from pathlib import Path

    import onnx_ir as ir
    import onnxruntime

    from graphopt.graph.diagnostics import Fact
    from graphopt.ort.runner import Runner
    from graphopt.tasks.ports import Array, IntArray

    RunPart = Callable[[str, Mapping[str, Array]], dict[str, Array]]
    """Runs a graph of a model of several, by name, and returns its outputs by name."""

Floats = npt.NDArray[np.float64]

# Sizes of the sample that is traced. They must differ from 0 and 1, to which torch specializes a graph, and the past
# must be shorter than any sliding window, whose cache would drop what the mask still counts.
SAMPLE_BATCH, SAMPLE_LENGTH = 2, 3

BATCH, LENGTH, PREFILL, PADDING = 2, 12, 8, 3
"""Rows of a probe, tokens of a row that are compared, those of them in the first of two calls, padding of one row."""


@dataclass(frozen=True)
class Call:
    """One call of a graph whose masks are asked for.

    Attributes:
        feeds: the inputs; caches have their length and no content, since a mask can depend on no more.
        length: new tokens.
        past: tokens that are in the cache already.
        real: bool [batch, past + length], which columns are tokens and not padding.
    """

    feeds: Mapping[str, Array]
    length: int
    past: int
    real: npt.NDArray[np.bool_]


class Probe(Protocol):
    """Random tokens on which a model is compared with what it was before a pass."""

    @property
    def tokens(self) -> Fact:
        """What is run, for reports."""

    @property
    def feeds(self) -> Mapping[str, Array]:
        """All tokens in one call without a cache, as the framework that the model comes from takes them."""

    @property
    def real(self) -> npt.NDArray[np.bool_]:
        """[batch, length]: which of the columns of :attr:`feeds` are compared."""

    def run(self, session: onnxruntime.InferenceSession) -> Floats:
        """Return what the model computes for the tokens that are compared, [tokens, width]."""

    def matching_rows(self, before: Floats, after: Floats) -> Floats:
        """Return those rows of ``before`` that ``after`` still has."""

    def figures(self, first: Floats, after: Floats) -> dict[str, float]:
        """Return how far ``after`` is from the model before any pass, in this task's own measures."""


NO_GENAI = Rule("task.no-genai", "onnxruntime-genai makes text, and {noun} makes none")


def upper(path: str) -> Any:
    """Return what ``package.module:name`` names: rooms above this one, which a task may only name and not import."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


class Task(abc.ABC):
    """A kind of model: its ports, how it is loaded and exported, fed, run and compared.

    A new kind is one file with a class of this kind and an object of it. It must recognize its ports and draw a probe;
    all else has a default that refuses with a reason, or does what suits most. What a method needs from rooms above
    this one it names as a dotted path, see :func:`upper`. Inputs need not be tokens: a probe may feed pictures or
    sound. Of a model of several graphs each is a file of its own, which :meth:`matches` tells apart.

    Attributes:
        name: what manifests call it.
        parts: the tasks of the other graphs of an artifact of this kind, by the names of their folders. The part runs
            first, and those of its outputs that are inputs of the graph by name go there.
        noun: what messages call such a model, with its article.
        quantity: what is compared before and after a pass, for reports.
        output: the graph output that holds it.
        caches: whether models of this kind may have caches of keys and values.
        follows: whether it reads hidden states of the graph whose part it is, and so runs behind that.
        generates: whether it makes text token by token, and so takes the options of generating.
        reads_text: whether it is fed tokens of texts, and so calibrated and judged on texts.
        is_fallback: whether a graph that no other task matches counts as one of these; one task is.
        auto_class: the class of transformers that loads a checkpoint.
        framework_names: what transformers calls outputs that have another name in the graph, by that name.
        reads: what ``graphopt run`` gives it: texts, images, recordings, or arrays of numbers.
        takes: what ``graphopt run`` may give it, where that is not :attr:`reads` alone.
        takes_seed: whether ``graphopt run`` begins at noise of a seed, of a model that generates no text.
        varying_ranges: inputs whose numbers have another range from call to call, so that fixed codes would not suit.
        unrolls: whether a model may be traced by a few of its layers, see :mod:`graphopt.models.unrolling`.
        dimensions: of inputs that are no tokens, masks or caches, the names of their dimensions, by the name of each.
        files: the files of a checkpoint that an artifact carries along beside those that all do, where they exist.
    """

    parts: ClassVar[Mapping[str, str]] = {}
    name: ClassVar[str]
    noun: ClassVar[str]
    quantity: ClassVar[str]
    output: ClassVar[str]
    caches: ClassVar[bool] = False
    follows: ClassVar[bool] = False
    generates: ClassVar[bool] = False
    reads_text: ClassVar[bool] = True
    is_fallback: ClassVar[bool] = False
    auto_class: ClassVar[str] = "AutoModel"
    framework_names: ClassVar[Mapping[str, str]] = {}
    reads: ClassVar[Literal["texts", "images", "recordings", "arrays"]] = "texts"
    takes: ClassVar[tuple[str, ...]] = ()
    takes_seed: ClassVar[bool] = False
    varying_ranges: ClassVar[tuple[str, ...]] = ()
    unrolls: ClassVar[bool] = True
    dimensions: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    files: ClassVar[tuple[str, ...]] = ()

    def with_inputs(self, inputs: Path | None) -> Task:
        """Return the task with the inputs of a file or folder in the place of random ones; itself for ``None``.

        Raises:
            InputError: models of this kind read texts.
        """
        if inputs is None:
            return self
        raise self.refusal("reads texts, and no arrays", inputs)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The graph outputs that are compared, :attr:`output` first; several have one shape."""
        return (self.output,)

    @abc.abstractmethod
    def matches(self, inputs: Collection[str], outputs: Collection[str]) -> bool:
        """Return whether a graph with these input and output names is of this kind."""

    @abc.abstractmethod
    def check(self, graph: ir.Graph) -> None:
        """Refuse a graph that cannot be fed as this kind of model.

        Raises:
            InputError: a name is missing, or an input is not known.
        """

    @abc.abstractmethod
    def probe(self, graph: ir.Graph, *, context: int = 0) -> Probe:
        """Draw a probe that fits ``graph``; ``context`` is how many tokens fill the cache before anything is compared.

        Raises:
            InputError: see :meth:`check`.
        """

    def probe_behind(self, graph: ir.Graph, parts: Mapping[str, ir.Graph], run: RunPart, config: Any = None) -> Probe:
        """Draw a probe that fits ``graph``, fed with what the other graphs of the model really make.

        Args:
            graph: the graph that makes the result.
            parts: the other graphs, by name.
            run: runs one of them, and returns its outputs by name.
            config: the configuration of transformers that the graphs were made by, where there is one.
        """
        del parts, run, config
        return self.probe(graph)

    def text_feeds(self, graph: ir.Graph, input_ids: IntArray) -> Mapping[str, Array]:
        """Return what to feed for whole texts at once: int64 [batch, length], no padding, empty caches.

        Raises:
            InputError: models of this kind read no text; or see :meth:`check`.
        """
        del graph
        raise self.refusal(f"reads no text, and {input_ids.size} tokens of text were to be read")

    def sample_feeds(self, model: ir.Model, runner: Runner, count: int) -> list[dict[str, Array]]:
        """Return what to feed to collect statistics on, of a model that reads no text: ``count`` samples at most.

        Args:
            model: the model as it came in.
            runner: runs it, where that tells how it can be fed.
            count: of samples that were given; of random ones a task may draw fewer.

        Raises:
            InputError: models of this kind cannot be calibrated, or see :meth:`check`.
        """
        del model, runner
        raise self.refusal(f"cannot be fed the {count} samples that statistics are collected on")

    def first_sample(self, graph: ir.Graph, session: onnxruntime.InferenceSession) -> dict[str, Array]:
        """Return what to feed to a session once, of a model that reads no text.

        Raises:
            InputError: models of this kind cannot be fed, or see :meth:`check`.
        """
        del graph, session
        raise self.refusal("cannot be fed here")

    def inputs_note(self) -> Fact | None:
        """Return what a reader of statistics should know of the inputs that they were collected on; mostly nothing."""
        return None

    def calls(self, graph: ir.Graph, sizes: Iterable[tuple[int, int, int]]) -> Iterator[Call]:
        """Yield a call of each size (batch, new tokens, past), with padding where there are several rows.

        None by default: then no mask of the graph is understood, and each stays as it is.

        Raises:
            InputError: see :meth:`check`.
        """
        del graph, sizes
        return iter(())

    def takes_config(self, config: Any, transformers: Any) -> bool:
        """Return whether a configuration of ``transformers``, the package, is of a model of this kind."""
        del config, transformers
        return False

    def class_of(self, config: Any, transformers: Any) -> Any:
        """Return the class of ``transformers``, the package, that a checkpoint of this configuration is loaded as."""
        factory = importlib.import_module("transformers.models.auto.auto_factory")
        return factory._get_model_class(config, getattr(transformers, self.auto_class)._model_mapping)

    def sample(self, model: Any) -> dict[str, Any]:
        """Return inputs to trace and run a model of transformers with, torch tensors by name: two padded prompts."""
        return sample_tokens(model)

    def export_parts(self, model: Any, source: str) -> tuple[Any, dict[str, Any]]:
        """Return the part of a model of transformers that becomes a graph, and inputs to trace it with.

        Args:
            model: a module of torch.
            source: where it came from, for messages.

        Raises:
            InputError: such a model cannot be exported.
        """
        del source
        return model, self.sample(model)

    def varying_axes(self, model: Any, source: str) -> Mapping[str, Collection[int]]:
        """Return which axes of traced inputs vary, by name; all axes of those that are not in it.

        Args:
            model: as for :meth:`export_parts`.
            source: see there.
        """
        del model, source
        return {}

    def remaining_outputs(self, outputs: Collection[str]) -> Collection[str]:
        """Return which outputs of a traced model its graph has; all by default."""
        return outputs

    def framework_inputs(self, model: Any, feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        """Return what a model of transformers takes where the graphs take ``feeds``."""
        del model
        return feeds

    def framework_output(self, output: Any) -> Array:
        """Return what is compared of the output of a model of transformers; several stand side by side in a last axis.

        Args:
            output: what a forward of the model returned, with tensors of torch.
        """
        arrays: list[Array] = [getattr(output, self.framework_names.get(name, name)).numpy() for name in self.outputs]
        return arrays[0] if len(arrays) == 1 else np.stack(arrays, axis=-1)

    def facts(self, folder: Path) -> Any:
        """Return the ``ModelFacts`` that the files of a folder state."""
        return upper("graphopt.artifact.hf_config:facts_of_config")(folder)

    def why_no_genai(self) -> Fact | None:
        """Return why onnxruntime-genai runs no model of this kind; ``None`` where it may."""
        return NO_GENAI(noun=self.noun)

    def print_run(self, model: Any, inputs: list[str], as_json: bool) -> None:
        """Print what ``graphopt run`` shows of a model that generates no text.

        Args:
            model: a :class:`graphopt.inference.session.Opened`.
            inputs: what was given as ``--prompt``, such as texts or files.
            as_json: whether to print JSON.

        Raises:
            InputError: ``graphopt run`` shows nothing of such a model.
        """
        del inputs, as_json
        raise self.refusal("has nothing that `graphopt run` shows", model.file)

    def print_evaluation(self, model: Any, reference: Path | None, text: str, threads: int, as_json: bool) -> None:
        """Print what ``graphopt eval`` measures of a model that generates no text.

        Args:
            model: a :class:`graphopt.inference.session.Opened`.
            reference: the folder of the model that it is compared with.
            text: what is read.
            threads: of onnxruntime; 0 for its default.
            as_json: whether to print JSON.

        Raises:
            InputError: ``graphopt eval`` measures nothing of such a model, or the reference is missing.
        """
        del reference, text, threads, as_json
        raise self.refusal("has nothing that `graphopt eval` measures", model.file)

    def measure_quality(self, reference: Any, artifact: Path, **reading: Any) -> dict[str, float]:
        """Return how far an artifact is from what it was made from, with ``kl_mean`` or ``cosine_mean`` for a verdict.

        Args:
            reference: the folder or file that it was made from.
            artifact: the folder of the artifact.
            reading: ``texts``, ``window``, ``tokens``, ``on_stage`` and ``ask`` of
                :func:`graphopt.quality.judge.judge`.

        Raises:
            InputError: nothing measures it.
        """
        del reference, reading
        raise self.refusal("has no measure of quality", artifact)

    def describe_quality(self, verdict: str, figures: Mapping[str, float]) -> Fact:
        """Return the sentence about the figures of :meth:`measure_quality`."""
        raise NotImplementedError(f"{self.name} measures quality, {figures}, and has no sentence for it: {verdict}")

    def refusal(self, reason: str, file: Path | None = None) -> InputError:
        """Return the error that says what a model of this kind cannot do."""
        return InputError(f"{self.noun} {reason}", file=file, remedy=f"the task {self.name} would have to define it")


def sample_tokens(model: Any) -> dict[str, Any]:
    """Return prompts to trace with; one is padded, since a mask of ones only would vanish from the graph."""
    torch = importlib.import_module("torch")
    ids = torch.arange(SAMPLE_BATCH * SAMPLE_LENGTH).reshape(SAMPLE_BATCH, SAMPLE_LENGTH)
    ids = ids % model.config.get_text_config().vocab_size
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    return {INPUT_IDS: ids, ATTENTION_MASK: mask}


def classes_of(config_type: type, mapping: Any) -> set[str]:
    """Return the names of the classes that a mapping of transformers has for a type of configuration."""
    if config_type not in mapping:
        return set()
    classes = mapping[config_type]
    return {member.__name__ for member in (classes if isinstance(classes, (list, tuple)) else (classes,))}


def random_padding(batch: int, keys: int, random: np.random.Generator) -> IntArray:
    """Return an attention mask [batch, keys] with padding anywhere; in its first row only the last column is a token.

    A single sequence has none, so that its oldest keys, where a window would end, are seen.
    """
    mask = np.ones((batch, keys), np.int64)
    if batch > 1:
        mask = (random.random((batch, keys)) > 0.3).astype(np.int64)
        mask[0, : keys - 1] = 0
    return mask
