"""Denoisers of diffusion models: a noisy sample and a timestep in, the noise or the velocity in it out.

Inputs: ``sample`` (UNets) or ``hidden_states`` (transformers) float [batch, channels, height, width]; ``timestep``
float or int64, [1] or [batch]; and what the sample is made by: ``encoder_hidden_states`` float [batch, tokens, width]
of a text, ``pooled_projections``, ``text_embeds``, ``time_ids``, ``resolution``, ``aspect_ratio``, ``class_labels``.
Output: ``out_sample`` or ``out_hidden_states`` float [batch, channels, height, width], twice the channels where the
variance is learned too. These are the names of the files that Optimum writes.

A model is judged by whole sampling loops, and calibrated on the calls of one: errors of a step are read by the next.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from graphopt.graph.diagnostics import Fact, Rule
from graphopt.ort.session import run
from graphopt.tasks.base import Call, Probe, upper
from graphopt.tasks.encoder import cosines
from graphopt.tasks.graph.draws import RandomInputs
from graphopt.tasks.graph.samples import Samples, cast_feeds
from graphopt.tasks.graph.task import GraphTask

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping
    from pathlib import Path

    import onnx_ir as ir
    import onnxruntime

    from graphopt.ort.runner import Runner
    from graphopt.tasks.base import Floats
    from graphopt.tasks.ports import Array

OUTPUTS = {"sample": "out_sample", "hidden_states": "out_hidden_states"}
"""The output of a denoiser, by the name of the input that it denoises."""

TIMESTEP, TEXT, POOLED_TEXT, CLASS_LABELS = "timestep", "encoder_hidden_states", "pooled_projections", "class_labels"
TEXT_EMBEDS, TIME_IDS, RESOLUTION, RATIO = "text_embeds", "time_ids", "resolution", "aspect_ratio"

SCHEDULER = "graphopt.scheduler"
"""The entry of a graph's metadata that holds the settings of its scheduler, as diffusers writes them, in JSON."""

STEPS, TIMESTEPS = 8, 1000
"""Steps of the loop that a model is judged and calibrated on, and timesteps that models are trained on."""

LOOP = Rule(
    "denoiser.quality",
    "{verdict}: cosine {cosine:.5f} and relative error {error:.2g} of samples behind {steps} steps, of {samples} "
    "seeds; of single calls cosine {calls:.5f}",
)
RANDOM_TEXT = Rule(
    "denoiser.random-text",
    "statistics come from sampling loops whose texts are random numbers; give calls of real ones: --inputs FILE.npz",
)

_TEXTS = (TEXT, POOLED_TEXT, TEXT_EMBEDS)
_CONDITIONS = {*_TEXTS, CLASS_LABELS, TIME_IDS, RESOLUTION, RATIO}
# Timesteps of the samples that passes are checked on, nearly all noise first.
_PROBE_MOMENTS = (0.95, 0.05, 0.5, 0.75, 0.25, 0.15, 0.85, 0.35)


def sample_name(inputs: Collection[str]) -> str:
    """Return the input that holds the noisy sample."""
    return next(name for name in OUTPUTS if name in inputs)


def default_scheduler(graph: ir.Graph) -> dict[str, Any]:
    """Return the settings of a scheduler for a graph without any: flow matching with ``pooled_projections``, else DDIM.

    DDIM has the noise schedule of Stable Diffusion for a model that reads texts, a linear one for others, as DiT and
    models of pixels were trained; pixels, of one or three channels, stay between -1 and 1.
    """
    inputs = {value.name for value in graph.inputs}
    if POOLED_TEXT in inputs:
        return {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0}
    channels = next(value.shape[1] for value in graph.inputs if value.name in OUTPUTS and value.shape is not None)
    settings: dict[str, Any] = {"_class_name": "DDIMScheduler", "clip_sample": channels in (1, 3)}
    if TEXT in inputs:
        settings |= {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
    return settings


def scheduler_of(model: ir.Model) -> dict[str, Any]:
    """Return the settings of the scheduler that travels with a graph, or the default."""
    text = model.metadata_props.get(SCHEDULER)
    settings: dict[str, Any] = json.loads(text) if text else default_scheduler(model.graph)
    return settings


class DenoiserSamples(Samples):
    """What a denoiser is fed: calls that were given, or noise at timesteps from the first to the last."""

    def feeds(self, graph: ir.Graph, count: int) -> list[dict[str, Array]]:
        """See :class:`graphopt.tasks.graph.samples.Samples`."""
        samples = super().feeds(graph, count)
        if not self.is_random:
            return samples
        for number, feeds in enumerate(samples):
            moments = np.roll(np.rint(TIMESTEPS * np.array(_PROBE_MOMENTS)), -number)
            feeds[TIMESTEP] = np.resize(moments, feeds[TIMESTEP].shape).astype(feeds[TIMESTEP].dtype)
        return samples

    def draw(self, graph: ir.Graph, seed: int) -> dict[str, Array]:
        """Return noise, and what a sample is made by; :meth:`settle` was called before."""
        assert self.sizes is not None
        return RandomInputs.of_graph(graph).draw(self.sizes, seed)


class DenoiserProbe:
    """Noise at timesteps, one for each row where the graph reads several.

    Args:
        graph: the graph as it came in.
        samples: what it is fed.
        output: the output that is compared.
    """

    def __init__(self, graph: ir.Graph, samples: DenoiserSamples, output: str) -> None:
        self._graph, self._samples, self._output = graph, samples, output

    @property
    def tokens(self) -> Fact:
        """See :class:`graphopt.tasks.base.Probe`."""
        return self._samples.description([self.feeds])

    @property
    def feeds(self) -> Mapping[str, Array]:
        """See :class:`graphopt.tasks.base.Probe`; the graph ran before."""
        return self._samples.feeds(self._graph, 1)[0]

    @property
    def real(self) -> npt.NDArray[np.bool_]:
        """Which samples are compared, [batch]: all."""
        return np.ones(len(self.feeds[sample_name(self.feeds)]), bool)

    def run(self, session: onnxruntime.InferenceSession) -> Floats:
        """Return what is made of each sample, float64 [batch, numbers]."""
        self._samples.settle(self._graph, session)
        (result,) = run(session, [self._output], cast_feeds(self.feeds, session))
        rows: Floats = np.asarray(result, np.float64).reshape(len(result), -1)
        return rows

    def matching_rows(self, before: Floats, after: Floats) -> Floats:
        """Return ``before``: each row is a sample."""
        del after
        return before

    def figures(self, first: Floats, after: Floats) -> dict[str, float]:
        """Return the cosine of the samples of a call, the mean, and the largest relative error."""
        errors = np.linalg.norm(after - first, axis=-1) / np.linalg.norm(first, axis=-1)
        return {"cosine_mean": float(cosines(first, after).mean()), "relative_error": float(errors.max())}


class Denoiser(GraphTask):
    """See the module for the ports."""

    name: ClassVar[str] = "denoiser"
    noun: ClassVar[str] = "a denoiser of a diffusion model"
    quantity: ClassVar[str] = "denoised samples"
    output: ClassVar[str] = OUTPUTS["sample"]
    is_fallback: ClassVar[bool] = False
    unrolls: ClassVar[bool] = False
    takes_seed: ClassVar[bool] = True
    varying_ranges: ClassVar[tuple[str, ...]] = tuple(OUTPUTS)
    framework_names: ClassVar[Mapping[str, str]] = {}
    dimensions: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **dict.fromkeys(OUTPUTS, ("batch", "channels", "height", "width")),
        TEXT: ("batch", "tokens"),
        **dict.fromkeys((TIMESTEP, POOLED_TEXT, CLASS_LABELS, TEXT_EMBEDS, TIME_IDS, RESOLUTION, RATIO), ("batch",)),
    }

    def __init__(self, inputs: Path | None = None) -> None:
        super().__init__(inputs)
        self.samples: DenoiserSamples = DenoiserSamples(inputs)
        self._reads_texts = True

    def matches(self, inputs: Collection[str], outputs: Collection[str]) -> bool:
        """See :class:`graphopt.tasks.base.Task`."""
        samples = [name for name in OUTPUTS if name in inputs]
        if len(samples) != 1 or TIMESTEP not in inputs or OUTPUTS[samples[0]] not in outputs:
            return False
        return set(inputs) <= {samples[0], TIMESTEP, *_CONDITIONS}

    def probe(self, graph: ir.Graph, *, context: int = 0) -> Probe:
        """See :class:`graphopt.tasks.base.Task`."""
        del context
        self._look_at(graph)
        return DenoiserProbe(graph, self.samples, OUTPUTS[sample_name([value.name or "" for value in graph.inputs])])

    def check(self, graph: ir.Graph) -> None:
        """See :class:`graphopt.tasks.base.Task`."""
        super().check(graph)
        self._look_at(graph)

    def _look_at(self, graph: ir.Graph) -> None:
        self._reads_texts = any(value.name in _TEXTS for value in graph.inputs)

    def sample_feeds(self, model: ir.Model, runner: Runner, count: int) -> list[dict[str, Array]]:
        """Return the calls of sampling loops of the model itself, one behind the other, or those that were given."""
        self._look_at(model.graph)
        if not self.samples.is_random:
            return super().sample_feeds(model, runner, count)
        calls: list[dict[str, Array]] = []
        make_loop = upper("graphopt.inference.sampling:sampling_loop")
        name = OUTPUTS[sample_name([value.name or "" for value in model.graph.inputs])]
        with runner.open_model(model) as session:
            self.samples.settle(model.graph, session)

            def denoise(feeds: Mapping[str, Array]) -> Array:
                calls.append(dict(feeds))
                result: Array = run(session, [name], cast_feeds(feeds, session))[0]
                return result

            seed = 0
            while len(calls) < count:
                make_loop(denoise, scheduler_of(model), self.samples.draw(model.graph, seed), STEPS, seed)
                seed += 1
        return calls[:count]

    def inputs_note(self) -> Fact | None:
        """Say that texts were random; noise and classes are what real inputs are."""
        return RANDOM_TEXT() if self.samples.is_random and self._reads_texts else None

    def calls(self, graph: ir.Graph, sizes: Iterable[tuple[int, int, int]]) -> Iterator[Call]:
        """Yield none: such a graph has no mask."""
        del graph, sizes
        return iter(())

    def remaining_outputs(self, outputs: Collection[str]) -> Collection[str]:
        """See :class:`graphopt.tasks.base.Task`."""
        return outputs

    def export_parts(self, model: Any, source: str) -> tuple[Any, dict[str, Any]]:
        """See :class:`graphopt.tasks.base.Task`."""
        return model, upper("graphopt.models.denoisers:sample_inputs")(model, _path(source))

    def varying_axes(self, model: Any, source: str) -> Mapping[str, Collection[int]]:
        """See :class:`graphopt.tasks.base.Task`: the batch and text tokens; one timestep of a UNet serves all rows."""
        inputs = upper("graphopt.models.denoisers:sample_inputs")(model, _path(source))
        axes: dict[str, Collection[int]] = {name: (0, 1) if name == TEXT else (0,) for name in inputs}
        return axes if len(inputs[TIMESTEP]) > 1 else {**axes, TIMESTEP: ()}

    def framework_output(self, output: Any) -> Array:
        """See :class:`graphopt.tasks.base.Task`."""
        numbers: Array = output[0].numpy()
        return numbers

    def measure_quality(self, reference: Any, artifact: Path, **reading: Any) -> dict[str, float]:
        """Compare samples behind whole loops; single calls where some were given."""
        if not self.samples.is_random:
            return super().measure_quality(reference, artifact, **reading)
        figures: dict[str, float] = upper("graphopt.quality.denoisers:loop_quality")(
            reference, artifact, self.samples, **reading
        )
        return figures

    def describe_quality(self, verdict: str, figures: Mapping[str, float]) -> Fact:
        """See :class:`graphopt.tasks.base.Task`."""
        if "steps" not in figures:
            return super().describe_quality(verdict, figures)
        return LOOP(
            verdict=verdict,
            cosine=figures["cosine_mean"],
            error=figures["relative_error"],
            steps=int(figures["steps"]),
            samples=int(figures["samples"]),
            calls=figures["cosine of calls"],
        )


def _path(source: str) -> Path:
    from pathlib import Path

    return Path(source)


DENOISER = Denoiser()
