"""A model of transformers with the configuration and the weights of a GGUF file."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from graphopt.errors import InputError
from graphopt.models.checkpoint import check_config, import_export_packages, quiet, reason_of
from graphopt.models.gguf.layouts import FileTensor, joined_experts, layout_of
from graphopt.models.gguf.rope import FREQUENCIES, apply_frequencies
from graphopt.models.gguf.settings import complete
from graphopt.quantization.gguf.file import GgufFile, open_gguf

if TYPE_CHECKING:
    from graphopt.graph.weights import Expression

SUFFIX = ".gguf"


def find_gguf(source: str) -> Path | None:
    """Return the GGUF file that ``source`` names: a path, or ``owner/name:file.gguf`` on the Hugging Face hub.

    Raises:
        InputError: it names one, and there is none.
    """
    if not source.endswith(SUFFIX):
        return None
    if Path(source).is_file():
        return Path(source)
    hub_id, separator, name = source.rpartition(":")
    if not separator or Path(source).parent.is_dir():
        raise InputError("there is no such file", file=source)
    _, transformers = import_export_packages()
    try:
        with quiet():
            return Path(transformers.utils.cached_file(hub_id, name))
    except Exception as error:
        raise InputError(
            f"the Hugging Face hub gave no such file ({reason_of(error)})",
            file=source,
            remedy="write it as owner/name:file.gguf",
        ) from error


def load_gguf(path: Path) -> tuple[Any, dict[str, Expression]]:
    """Return the model of a GGUF file in float32, ready to run, and the expression of each of its weights.

    The model holds all weights in memory.

    Raises:
        InputError: the file cannot be read, or its architecture is none that transformers and graphopt know, or it is
            not a causal language model, or weights are missing or left over.
        MissingDependencyError: torch, transformers or gguf is not installed.
    """
    model, weights = outline_gguf(path)
    return fill(model, weights), weights


def fill(model: Any, weights: dict[str, Expression]) -> Any:
    """Evaluate the weights of a model into its memory, and return it, ready to run.

    Args:
        model: as from :func:`outline_gguf`.
        weights: what came with it.
    """
    torch, _ = import_export_packages()
    with torch.no_grad():
        state = model.state_dict()
        for name, expression in weights.items():
            state[name].copy_(torch.from_numpy(np.require(expression.numpy(), requirements="W")))
    return model


def outline_gguf(path: Path) -> tuple[Any, dict[str, Expression]]:
    """Return the model of a GGUF file, whose parameters hold nothing, and the expression of each of its weights.

    Raises:
        InputError: as :func:`load_gguf`.
        MissingDependencyError: torch, transformers or gguf is not installed.
    """
    file = open_gguf(path)
    model = empty_model(file)
    weights = expressions_of(file, model)
    if FREQUENCIES in file.tensors:
        apply_frequencies(model, file)
    return model.eval(), weights


def empty_model(file: GgufFile) -> Any:
    """Return the model of transformers that a file is of, in float32, with whatever was in memory as its weights.

    Raises:
        InputError: its architecture is none that transformers and graphopt know, or not a causal language model.
    """
    torch, transformers = import_export_packages()
    config = config_of(file, transformers)
    initialization = importlib.import_module("transformers.initialization")
    with quiet():
        try:
            with initialization.no_init_weights():
                model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            model.tie_weights()
        except Exception as error:
            raise InputError(
                f"transformers cannot make a model of {file.architecture} ({reason_of(error)})", file=file.path
            ) from error
    model.config.architectures = [type(model).__name__]
    return model


def config_of(file: GgufFile, transformers: Any) -> Any:
    """Return the configuration of transformers that says what the file's metadata says.

    Raises:
        InputError: the architecture, or a setting of it, is none that transformers and graphopt know.
    """
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    if layout_of(file.architecture) is None:
        raise InputError(
            f"graphopt does not know how {file.architecture} lays out its weights",
            file=file.path,
            remedy="export the original checkpoint",
        )
    with quiet():
        try:
            config = transformers.AutoConfig.from_pretrained(str(file.path.parent), gguf_file=file.path.name)
        except Exception as error:
            raise InputError(
                f"transformers cannot read models of the architecture {file.architecture} ({reason_of(error)})",
                file=file.path,
                remedy=f"it knows {', '.join(sorted(GGUF_SUPPORTED_ARCHITECTURES))}",
            ) from error
    complete(config, file)
    check_config(config, str(file.path))
    return config


def expressions_of(file: GgufFile, model: Any) -> dict[str, Expression]:
    """Return each weight of ``model`` by its name, as an expression over the file.

    Raises:
        InputError: the file lacks a weight, has one of another shape, or one that the model has no place for.
    """
    names = _names(file, model)
    parts: dict[str, dict[str, Expression]] = {}
    layout = layout_of(file.architecture)
    assert layout is not None
    for name, tensor in file.tensors.items():
        if name == FREQUENCIES:
            continue
        # Stacked experts are parameters of their own, whose names do not end in .weight.
        target = names.get(name) or names.get(name.removesuffix(".weight"))
        if target is None:
            raise InputError(
                f"{type(model).__name__} has no place for a tensor of the file",
                file=file.path,
                tensor=name,
                shape=tensor.shape,
                remedy="transformers would leave it out, and compute something else than llama.cpp does",
            )
        parts.setdefault(target, {})[name] = layout(FileTensor(name, tensor, model.config))
    state = model.state_dict()
    weights = {
        name: next(iter(tensors.values())) if len(tensors) == 1 else joined_experts(tensors)
        for name, tensors in parts.items()
    }
    for name, expression in weights.items():
        if expression.shape != tuple(state[name].shape):
            raise InputError(
                f"a tensor of the file does not fit {type(model).__name__}, where it is {list(state[name].shape)}",
                file=file.path,
                tensor=", ".join(parts[name]),
                shape=expression.shape,
                remedy="the file's metadata and its tensors do not belong together",
            )
    addresses = {state[name].data_ptr() for name in weights}
    missing = [name for name, tensor in state.items() if math.prod(tensor.shape) and tensor.data_ptr() not in addresses]
    if missing:
        raise InputError(
            f"the file lacks {len(missing)} weight(s) of {type(model).__name__}",
            file=file.path,
            tensor=missing[0],
            remedy="give a complete file",
        )
    return weights


def _names(file: GgufFile, model: Any) -> dict[str, str]:
    """Return the name in transformers of each tensor's name in GGUF."""
    mapping = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    processor = mapping.TENSOR_PROCESSORS.get(file.architecture, mapping.TensorProcessor)
    try:
        names: dict[str, str] = mapping.get_gguf_hf_weights_map(model, processor(config=model.config.to_dict()))
    except NotImplementedError as error:
        raise InputError(
            f"the package gguf has no names for the tensors of {file.architecture} ({reason_of(error)})",
            file=file.path,
        ) from error
    return names
