"""A model with its weights by name: read lazily where its checkpoint allows it, else loaded by transformers.

Whatever a checkpoint is, what leaves here is the same: the module tree of transformers, and for each of its parameters
an expression. Nothing behind it asks what kind of file the weights lie in.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from graphopt.errors import InputError
from graphopt.graph.diagnostics import Fact, Rule
from graphopt.graph.weights import Expression, Inline
from graphopt.graph.weights.safetensors_files import INDEX, SINGLE, tensors_of_files, tensors_of_folder
from graphopt.models.checkpoint import (
    class_of,
    import_export_packages,
    load_config,
    load_model,
    load_quantized_config,
    other_package,
    quiet,
    reason_of,
)
from graphopt.models.checkpoint_tensors import Parameter, stored_tensors
from graphopt.models.lazy_tensors import dtype_of, expression_of_tensor
from graphopt.quantization.checkpoints.importer import Settings, decoded_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

IN_MEMORY = Rule("export.in-memory", "the whole model was loaded into memory: {why}")
OTHER_FILES = Rule("export.other-files", "its weights are not in safetensors files alone")
NOT_LAZY = Rule("export.not-lazy", "transformers does more to its weights than to move and widen them ({error})")

NO_WEIGHTS = Rule("export.no-weights", "this is the graph alone: its weights were not asked for")
CODES = Rule(
    "export.codes",
    "{count} matrices are decoded from codes of {method}; the step keep_codes stores these codes again",
)

_ADAPTER = "adapter_config.json"


@dataclass
class LoadedModel:
    """A model of transformers and its weights.

    Attributes:
        model: the module tree; its parameters may hold no numbers.
        weights: what each parameter is, by its name; tied ones under each of theirs.
        runnable: returns a model that holds its weights and can run.
        notes: what a reader should know of how it was loaded.
        tensors: of the checkpoint by its own names, decoded; ``None`` where they are not in safetensors files alone.
    """

    model: Any
    weights: Mapping[str, Expression]
    runnable: Callable[[], Any]
    notes: list[Fact]
    tensors: Mapping[str, Expression] | None = None


def load(source: str) -> LoadedModel:
    """Load a causal language model or an encoder of transformers, without reading its weights where that can be.

    Args:
        source: a folder, or the id of a model on the Hugging Face hub.

    Raises:
        InputError: there is no such model, it is neither of the two, or weights are missing or damaged.
        MissingDependencyError: torch or transformers is not installed, or a package that transformers needs.
    """
    config, settings = load_quantized_config(source)
    tensors = _tensors_of(config, source)
    if settings:
        return _load_quantized(config, settings, source, tensors)
    reason = OTHER_FILES()
    if tensors is not None:
        try:
            model = load_model(load_config(source), source, tensors)
            return LoadedModel(model, weights_of(model), lambda: load_model(load_config(source), source), [], tensors)
        except InputError as error:
            # What is wrong with the checkpoint itself is said below.
            reason = NOT_LAZY(error=reason_of(error))
    model = load_model(config, source)
    return LoadedModel(
        model, weights_of(model), lambda: load_model(load_config(source), source), [IN_MEMORY(why=reason)], tensors
    )


def _load_quantized(
    config: Any, settings: Settings, source: str, tensors: Mapping[str, Expression] | None
) -> LoadedModel:
    if tensors is None:
        raise InputError(
            "the checkpoint is quantized, and its weights are not in safetensors files alone",
            file=source,
            remedy="give the original one, in 16 or 32 bits",
        )
    weights = decoded_weights(tensors, settings, source)
    model = load_model(config, source, weights)
    count = sum(weight is not tensors.get(name) for name, weight in weights.items())
    return LoadedModel(
        model,
        weights_of(model),
        lambda: load_model(load_config(source), source, weights, evaluate=True),
        [CODES(count=count, method=settings["quant_method"])],
        weights,
    )


def outline(source: str) -> LoadedModel:
    """Return a model whose weights are names: nothing but its configuration is read.

    Args:
        source: a folder with a ``config.json``, or the id of a model on the Hugging Face hub.

    Raises:
        InputError: there is no such model, or it is neither a causal language model nor an encoder.
        MissingDependencyError: torch or transformers is not installed, or a package that transformers needs.
    """
    torch, _ = import_export_packages()
    config = load_config(source)
    try:
        with quiet(), torch.device("meta"):
            empty = class_of(config)._from_config(load_config(source), dtype=torch.float32)
    except ImportError as error:
        raise other_package(error, source) from error
    tensors = {
        name: Parameter(name, dtype_of(tensor.dtype), tuple(tensor.shape)) for name, tensor in stored_tensors(empty)
    }
    model = load_model(config, source, tensors)

    def refuse() -> Any:
        raise InputError("there are no weights", file=source)

    return LoadedModel(model, weights_of(model), refuse, [NO_WEIGHTS()])


def weights_of(model: Any, expressions: Mapping[str, Expression] | None = None) -> dict[str, Expression]:
    """Return what each parameter of ``model`` is, by name, tied ones under each of their names.

    Args:
        model: a model; parameters that are neither lazy nor known are read from its memory, and not copied.
        expressions: expressions of parameters, by name.
    """
    by_tensor: dict[int, Expression] = {}
    tensors = dict(stored_tensors(model))
    for name, tensor in tensors.items():
        expression = (expressions or {}).get(name) or expression_of_tensor(tensor)
        if expression is not None:
            by_tensor[id(tensor)] = expression
    for tensor in tensors.values():
        if id(tensor) not in by_tensor:
            by_tensor[id(tensor)] = Inline.from_array(np.asarray(tensor.detach().contiguous().numpy()))
    return {name: by_tensor[id(tensor)] for name, tensor in tensors.items()}


def _tensors_of(config: Any, source: str) -> dict[str, Expression] | None:
    """Return the tensors of a checkpoint, or ``None`` if transformers would read more than its safetensors files."""
    if getattr(config, "transformers_weights", None) or getattr(type(config), "extra_files", None):
        return None
    if Path(source).is_dir():
        return None if (Path(source) / _ADAPTER).is_file() else tensors_of_folder(Path(source))
    _, transformers = import_export_packages()
    hub = importlib.import_module("transformers.utils.hub")

    def cached_file(name: str) -> str | None:
        path: str | None = transformers.utils.cached_file(
            source, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
        )
        return path

    with quiet():
        if cached_file(_ADAPTER) is not None:
            return None
        single = cached_file(SINGLE)
        if single is not None:
            return tensors_of_files([Path(single)])
        index = cached_file(INDEX)
        if index is None:
            return None
        files, _ = hub.get_checkpoint_shard_files(source, index)
    return tensors_of_files([Path(file) for file in files])
