"""The door for diffusion models: a denoiser of diffusers, a UNet or a transformer, becomes one ONNX graph.

    folder with config.json                the denoiser alone
    folder with model_index.json           a pipeline: its folder ``unet`` or ``transformer``, with its scheduler

Needs torch, transformers and diffusers, which are imported inside the functions.
"""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path
from typing import Any

import onnx_ir as ir

from graphopt.artifact.hf_config import json_object
from graphopt.errors import InputError
from graphopt.graph.editing import bypass
from graphopt.inference.sampling import import_diffusers
from graphopt.models.checkpoint import import_export_packages, quiet, reason_of
from graphopt.models.ports import name_ports
from graphopt.models.trace import export_graph, finish
from graphopt.tasks.base import SAMPLE_BATCH
from graphopt.tasks.denoiser import (
    CLASS_LABELS,
    DENOISER,
    OUTPUTS,
    POOLED_TEXT,
    RATIO,
    RESOLUTION,
    SCHEDULER,
    TEXT,
    TEXT_EMBEDS,
    TIME_IDS,
    TIMESTEP,
    default_scheduler,
)

CONFIG, INDEX, SCHEDULER_FILE = "config.json", "model_index.json", "scheduler_config.json"
DENOISER_FOLDERS = ("unet", "transformer")

_TOKENS = 5
# The settings that may say how wide a text embedding is, the first that is set counts.
_TEXT_WIDTHS = ("encoder_hid_dim", "joint_attention_dim", "caption_channels", "cross_attention_dim")
_CONDITION_NAMES = {TEXT_EMBEDS, TIME_IDS, RESOLUTION, RATIO}


def denoiser_folder(source: str | Path) -> Path | None:
    """Return the folder of the denoiser in ``source``: itself, or a part of a pipeline; ``None`` where it has none."""
    folder = Path(source)
    if (folder / INDEX).is_file():
        parts = (folder / name for name in DENOISER_FOLDERS)
        return next((part for part in parts if (part / CONFIG).is_file()), None)
    is_of_diffusers = (folder / CONFIG).is_file() and "_class_name" in json_object(folder / CONFIG)
    return folder if is_of_diffusers else None


def load_denoiser(folder: Path) -> Any:
    """Load a denoiser of diffusers in float32, ready to run; its forward takes tensors alone.

    Raises:
        InputError: diffusers has no such class, or cannot read the weights.
        MissingDependencyError: torch or diffusers is not installed.
    """
    import_export_packages()
    torch, diffusers = import_diffusers()
    name = str(json_object(folder / CONFIG)["_class_name"])
    if not hasattr(diffusers, name):
        raise InputError(f"diffusers {diffusers.__version__} has no class {name}", file=folder / CONFIG)
    with quiet():
        try:
            model = getattr(diffusers, name).from_pretrained(folder, torch_dtype=torch.float32).eval()
        except Exception as error:
            raise InputError(
                f"the weights cannot be loaded ({reason_of(error)})", file=folder, remedy="is a file missing?"
            ) from error
    return _flat(torch, model) if _CONDITION_NAMES & set(sample_inputs(model, folder)) else model


def _flat(torch: Any, model: Any) -> Any:
    """Return a module that takes each of ``added_cond_kwargs`` as an input of its own."""

    class Flat(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model, self.config = model, model.config

        def forward(self, **inputs: Any) -> Any:
            conditions = {name: inputs.pop(name) for name in _CONDITION_NAMES & set(inputs)}
            return self.model(**inputs, added_cond_kwargs=conditions)

    return Flat().eval()


def sample_inputs(model: Any, source: Path) -> dict[str, Any]:
    """Return inputs to trace a denoiser with, torch tensors by name: two noisy samples and what they are made by.

    Raises:
        InputError: the model reads something else, or does not say how large its samples are.
    """
    torch = importlib.import_module("torch")
    config, inner = model.config, getattr(model, "model", model)
    parameters = inspect.signature(inner.forward).parameters
    first = next(name for name in parameters if name != "self")
    side = config.get("sample_size")
    if first not in OUTPUTS or TIMESTEP not in parameters or "img_ids" in parameters or not config.get("in_channels"):
        raise InputError(
            f"{type(inner).__name__} is no denoiser of samples [batch, channels, height, width] by a timestep",
            file=source,
            remedy="graphopt takes denoisers as UNet2DModel, UNet2DConditionModel, DiTTransformer2DModel, "
            "PixArtTransformer2DModel and SD3Transformer2DModel of diffusers",
        )
    if not side:
        raise InputError("the configuration states no sample_size", file=source / CONFIG, remedy="write it there")
    height, width = (side, side) if isinstance(side, int) else side
    random, batch = torch.Generator().manual_seed(0), SAMPLE_BATCH

    def noise(*shape: int) -> Any:
        return torch.randn(batch, *shape, generator=random)

    inputs = {first: noise(config["in_channels"], height, width)}
    if TEXT in parameters:
        widths = [config.get(name) for name in _TEXT_WIDTHS]
        text_width = next((size for size in widths if size), None)
        if text_width is not None:
            inputs[TEXT] = noise(_TOKENS, text_width if isinstance(text_width, int) else text_width[0])
    if POOLED_TEXT in parameters:
        inputs[POOLED_TEXT] = noise(config["pooled_projection_dim"])
    # One timestep serves all rows of a UNet; transformers of diffusers read one for each.
    inputs[TIMESTEP] = torch.full((1,) if first == "sample" else (batch,), 7.0)
    has_classes = config.get("num_class_embeds") or config.get("norm_type") == "ada_norm_zero"
    if CLASS_LABELS in parameters and has_classes:
        inputs[CLASS_LABELS] = torch.arange(batch)
    if config.get("addition_embed_type") == "text_time":
        ids = 6
        embed = config["projection_class_embeddings_input_dim"] - ids * config["addition_time_embed_dim"]
        inputs |= {TEXT_EMBEDS: noise(embed), TIME_IDS: torch.full((batch, ids), 64.0)}
    elif config.get("addition_embed_type") is not None:
        raise InputError(f"conditions of the kind {config['addition_embed_type']} are not taken", file=source / CONFIG)
    if getattr(inner, "use_additional_conditions", False):
        inputs |= {RESOLUTION: torch.full((batch, 2), 64.0), RATIO: torch.ones(batch, 1)}
    return inputs


def trace_denoiser(model: Any, folder: Path) -> ir.Model:
    """Trace a denoiser into one graph: any batch, any number of text tokens, samples of the size that it states.

    The settings of its scheduler travel in the metadata of the graph.

    Raises:
        InputError: the exporter fails on it, or see :func:`sample_inputs`.
    """
    program = export_graph(model, str(folder), DENOISER)
    for value in program.graph.inputs:  # the exporter tells an input from an output of its name
        value.name = (value.name or "").removeprefix("input.")
    name = next(value.name for value in program.graph.inputs if value.name in OUTPUTS)
    program.graph.outputs[0].name = OUTPUTS[str(name)]
    _drop_idle_squeezes(program.graph)
    name_ports(program.graph, DENOISER)
    finish(program, model, str(folder), DENOISER)
    program.metadata_props[SCHEDULER] = json.dumps(scheduler_settings(folder) or default_scheduler(program.graph))
    return program


def _drop_idle_squeezes(graph: ir.Graph) -> None:
    """Drop each ``Squeeze`` of an axis that has several numbers: torch leaves such an axis, ONNX refuses it."""
    for node in list(graph):
        if (node.domain, node.op_type) != ("", "Squeeze") or len(node.inputs) < 2:
            continue
        value, axes = node.inputs[0], ir.convenience.get_const_tensor(node.inputs[1]) if node.inputs[1] else None
        shape = None if value is None else value.shape
        if value is None or shape is None or axes is None or node.outputs[0].is_graph_output():
            continue
        sizes = [shape[int(axis)] for axis in axes.numpy().ravel()]
        if sizes and all(isinstance(size, int) and size != 1 for size in sizes):
            bypass(node, value)


def scheduler_settings(folder: Path) -> dict[str, Any] | None:
    """Return the settings of the scheduler that lies in the folder of a denoiser, or beside it in its pipeline."""
    files = (folder / SCHEDULER_FILE, folder.parent / "scheduler" / SCHEDULER_FILE)
    return next((json_object(file) for file in files if file.is_file()), None)
