"""A causal language model of transformers, loaded and traced into one ONNX graph that serves prefill and decode.

Needs torch and transformers, which are imported inside the functions: ``import graphopt`` works without them.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from graphopt.analysis.interface import Interface
from graphopt.errors import InputError, MissingDependencyError
from graphopt.models.naming import name_parts

if TYPE_CHECKING:
    import torch

OPSET = 23
"""The first opset with ``Attention``, ``RMSNormalization`` and ``RotaryEmbedding``."""

# Sizes of the sample that is traced. They must differ from 0 and 1, to which torch specializes a graph, and the past
# must be shorter than any sliding window, whose cache would drop what the mask still counts.
_BATCH, _PAST = 2, 3
# Axes of a key or value that vary: batch and past. Naming only these saves torch half of its time.
_CACHE_AXES = (0, 2)
_FLAGS = ("use_cache", "return_dict", "output_attentions", "output_hidden_states")


def import_export_packages() -> tuple[Any, Any]:
    """Return the modules ``torch`` and ``transformers``, the latter with its exporters.

    Raises:
        MissingDependencyError: one of them is not installed, or too old.
    """
    try:
        torch = importlib.import_module("torch")
        transformers = importlib.import_module("transformers")
        importlib.import_module("transformers.exporters")
    except ImportError as error:
        raise MissingDependencyError(
            f"exporting a Hugging Face model needs torch and transformers ({error})",
            remedy='pip install "graphopt[export]"',
        ) from error
    return torch, transformers


def load_model(source: str) -> Any:
    """Load a causal language model of transformers in float32, ready to run.

    Args:
        source: a folder, or the id of a model on the Hugging Face hub.

    Raises:
        InputError: there is no such model, it is not a causal language model, or weights are missing.
        MissingDependencyError: torch or transformers is not installed.
    """
    torch, transformers = import_export_packages()
    with quiet():
        # Code that a model brings along is never run.
        try:
            config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
        except Exception as error:
            raise InputError(
                f"no model configuration can be read ({_first_line(error)})",
                file=source,
                remedy="is config.json there, and whole?"
                if Path(source).is_dir()
                else "no file, folder or shipped model has this name and the Hugging Face hub gave none; is it spelled right?",
            ) from error
        _check_causal(config, source, transformers)
        try:
            model, loading = transformers.AutoModelForCausalLM.from_pretrained(
                source, config=config, dtype=torch.float32, trust_remote_code=False, output_loading_info=True
            )
        except Exception as error:
            raise InputError(
                f"the weights cannot be loaded ({_first_line(error)})", file=source, remedy="is a file truncated or missing?"
            ) from error
    missing = sorted(loading["missing_keys"])
    if missing:
        raise InputError(
            f"the checkpoint lacks {len(missing)} weight(s) of {type(model).__name__}",
            file=source,
            tensor=missing[0],
            remedy="transformers would fill them with random numbers; give a complete checkpoint",
        )
    return model.eval()


def _check_causal(config: Any, source: str, transformers: Any) -> None:
    wanted = {cls.__name__ for cls in _causal_classes(type(config), transformers)}
    named = list(getattr(config, "architectures", None) or wanted)
    if getattr(config, "is_encoder_decoder", False) or not wanted.intersection(named):
        raise InputError(
            f"{', '.join(named) or type(config).__name__} is not a causal language model",
            file=source,
            remedy="graphopt takes decoder-only models, those that transformers loads with AutoModelForCausalLM",
        )
    if getattr(config, "quantization_config", None) is not None:
        raise InputError(
            "the checkpoint is quantized already", file=source, remedy="give the original one, in 16 or 32 bits"
        )


def _causal_classes(config_type: type, transformers: Any) -> tuple[type, ...]:
    mapping = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if config_type not in mapping:
        return ()
    classes = mapping[config_type]
    return tuple(classes) if isinstance(classes, (list, tuple)) else (classes,)


def trace(model: Any, source: str) -> ir.Model:
    """Trace ``model`` into one graph: any batch, any number of new tokens, any past, an empty one included.

    Args:
        model: as from :func:`load_model`.
        source: where it came from, for messages.

    Returns:
        A graph of opset 23 with the inputs and outputs of :mod:`graphopt.analysis.interface`.

    Raises:
        InputError: the exporter fails on it, or the graph has no key-value cache.
        MissingDependencyError: a package that the exporter needs is missing or too old.
    """
    torch, transformers = import_export_packages()
    exporters = importlib.import_module("transformers.exporters")
    decompose = importlib.import_module("transformers.exporters.utils").decompose_for_generation
    with quiet():
        try:
            exporter = exporters.OnnxExporter()
        except ImportError as error:
            raise MissingDependencyError(str(error), remedy='pip install "graphopt[export]"') from error
        # A checkpoint's own settings (beams, static caches, sampling) would change what is traced.
        model.generation_config = transformers.GenerationConfig(do_sample=False, use_cache=True, pad_token_id=0)
        try:
            decode, inputs = decompose(model, _sample(torch, model), multi_token_decode=True)["decode"]
            shapes = {name: _varying(torch, value) for name, value in inputs.items() if name not in _FLAGS}
            config = exporters.OnnxConfig(dynamic=True, dynamic_shapes=shapes, opset_version=OPSET)
            program: ir.Model = exporter.export(decode, inputs, config=config).program
        except Exception as error:
            raise InputError(
                f"transformers cannot export this {type(model).__name__} to ONNX ({_first_line(error)})",
                file=source,
                remedy="graphopt takes what transformers.exporters.OnnxExporter takes; the cause is chained below",
            ) from error
    weights = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    name_parts(program, {name: tuple(tensor.shape) for name, tensor in weights})
    if not any((value.name or "").startswith("present.") for value in program.graph.outputs):
        raise InputError(
            f"{type(model).__name__} came out without a key-value cache, so it cannot generate token by token",
            file=source,
            remedy="is it a bidirectional model? graphopt takes decoder-only models",
        )
    Interface.of_graph(program.graph)
    return program


def _sample(torch: Any, model: Any) -> dict[str, torch.Tensor]:
    """Return prompts to trace with; one is padded, since a mask of ones only would vanish from the graph."""
    ids = torch.arange(_BATCH * _PAST).reshape(_BATCH, _PAST) % model.config.get_text_config().vocab_size
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    return {"input_ids": ids, "attention_mask": mask}


def _varying(torch: Any, value: Any) -> Any:
    """Return which axes of a traced input vary, in the nesting that torch.export expects."""
    vary = torch.export.Dim.AUTO
    if value is None or isinstance(value, (bool, int, float, str)):
        return None
    if isinstance(value, torch.Tensor):
        return dict.fromkeys(range(value.dim()), vary)
    register = importlib.import_module("transformers.exporters.exporter_dynamo").register_pytree_node
    register(type(value))
    leaves, _ = torch.utils._pytree.SUPPORTED_NODES[type(value)].flatten_fn(value)
    return [dict.fromkeys(_CACHE_AXES if leaf.dim() == 4 else range(leaf.dim()), vary) for leaf in leaves]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep warnings, log lines below errors, progress bars and prints of torch and transformers off the terminal.

    What goes wrong is raised, not printed, so nothing is lost.
    """
    bars = importlib.import_module("transformers.utils.logging")
    shown, level = bars.is_progress_bar_enabled(), logging.root.manager.disable
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.disable(max(level, logging.WARNING))
        bars.disable_progress_bar()
        try:
            yield
        finally:
            logging.disable(level)
            if shown:
                bars.enable_progress_bar()


def _first_line(error: BaseException) -> str:
    """Return the first line of the innermost cause: exporters wrap theirs in pages of advice."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def save_companions(source: str, model: Any, folder: Path) -> list[str]:
    """Write configuration and tokenizer of ``model`` as transformers saves them, and return notes on what is missing.

    Args:
        source: a folder, or the id of a model on the hub.
        model: the model; its configuration is written if it is not ``None``.
        folder: where to write ``tokenizer.json``, ``config.json`` and the like.
    """
    _, transformers = import_export_packages()
    with quiet():
        if model is not None:
            model.config.save_pretrained(folder)
            model.generation_config.save_pretrained(folder)
        try:
            transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False).save_pretrained(folder)
        except Exception as error:
            return [f"no tokenizer was carried along: transformers cannot load it ({_first_line(error)})"]
    if not (folder / "tokenizer.json").is_file():
        return ["no tokenizer was carried along: it cannot be written as tokenizer.json"]
    return []
