"""A model of transformers, loaded with its tokenizer: a causal language model or an encoder, and nothing else.

Needs torch and transformers, which are imported inside the functions: ``import graphopt`` works without them.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import re
import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from graphopt.artifact.hf_config import (
    MODULES,
    POOLING,
    PREPROCESSOR,
    PROCESSOR,
    PROMPTS,
    SENTENCES,
    modules_of,
)
from graphopt.errors import InputError, MissingDependencyError
from graphopt.graph.diagnostics import Fact, Rule
from graphopt.models.lazy_tensors import lazy_tensors
from graphopt.tasks import TASKS
from graphopt.tasks.base import classes_of
from graphopt.tasks.encoder import ENCODER

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from graphopt.graph.weights import Expression

NO_TOKENIZER = Rule("export.no-tokenizer", "no tokenizer was carried along: {why}")
NOT_BESIDE = Rule("export.no-tokenizer-beside", "there is no tokenizer.json beside the model")
NOT_IN_FOLDER = Rule("export.no-tokenizer-in-folder", "the folder has none")
NOT_LOADED = Rule("export.tokenizer-not-loaded", "transformers cannot load it ({error})")
NOT_WRITTEN = Rule("export.tokenizer-not-written", "it cannot be written as tokenizer.json")
NO_HEAD = Rule("export.head-left-out", "the head of {architecture} was left out: this is the {model} in it")

_POOLER = "pooler"


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


def load_config(source: str) -> Any:
    """Read the configuration of a causal language model or an encoder of transformers, as if it were not quantized.

    Args:
        source: a folder, or the id of a model on the Hugging Face hub.

    Raises:
        InputError: there is no such model, or it is neither of the two.
        MissingDependencyError: torch or transformers is not installed.
    """
    return load_quantized_config(source)[0]


def load_quantized_config(source: str) -> tuple[Any, dict[str, Any]]:
    """Return what :func:`load_config` does, and the ``quantization_config``; empty where there is none.

    Raises:
        InputError: as :func:`load_config`.
        MissingDependencyError: as :func:`load_config`.
    """
    _, transformers = import_export_packages()
    with quiet():
        # Code that a model brings along is never run.
        try:
            config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
        except Exception as error:
            unknown = "no file, folder or shipped model has this name, and the Hugging Face hub gave none; a typo?"
            raise InputError(
                f"no model configuration can be read ({reason_of(error)})",
                file=source,
                remedy="is config.json there, and whole?" if Path(source).is_dir() else unknown,
            ) from error
        if has_pooling(source):
            # Such a checkpoint may name a language model whose head it does not use.
            config.architectures = sorted(classes_of(type(config), transformers.MODEL_MAPPING)) or config.architectures
        check_config(config, source)
    settings = config.__dict__.pop("quantization_config", None) or {}
    return config, settings if isinstance(settings, dict) else settings.to_dict()


def load_model(
    config: Any, source: str, tensors: Mapping[str, Expression] | None = None, *, evaluate: bool = False
) -> Any:
    """Load a causal language model or an encoder of transformers in float32, ready to run.

    Args:
        config: as from :func:`load_config`.
        source: where its weights are: a folder, or the id of a model on the Hugging Face hub.
        tensors: the tensors of the checkpoint by name, where they are known. Then nothing is read: the parameters of
            the model are tensors of :mod:`graphopt.models.lazy_tensors`, which cannot run.
        evaluate: whether ``tensors`` are evaluated into memory, so that the model can run.

    Raises:
        InputError: weights are missing or cannot be loaded.
        MissingDependencyError: transformers needs a package that is not installed.
        NotLazyError: transformers loads this checkpoint by more than moving and widening numbers.
    """
    torch, transformers = import_export_packages()
    kind = class_of(config)
    options: dict[str, Any] = {"config": config, "dtype": torch.float32, "output_loading_info": True}
    folder: str | None = source
    if tensors is not None:
        folder = None
    else:
        options["trust_remote_code"] = False
    states = _states(tensors, evaluate)
    with quiet():
        try:
            model, loading = kind.from_pretrained(folder, **options, **states)
            if {name.partition(".")[0] for name in loading["missing_keys"]} == {_POOLER}:
                # Trained to fill in masked words, such a checkpoint has no pooler, and embeddings need none.
                model, loading = kind.from_pretrained(folder, add_pooling_layer=False, **options, **states)
        except ImportError as error:
            raise other_package(error, source) from error
        except Exception as error:
            raise InputError(
                f"the weights cannot be loaded ({reason_of(error)})",
                file=source,
                remedy="is a file truncated or missing?",
            ) from error
    missing = sorted(loading["missing_keys"])
    if missing:
        raise InputError(
            f"the checkpoint lacks {len(missing)} weight(s) of {type(model).__name__}",
            file=source,
            tensor=missing[0],
            remedy="transformers would fill them with random numbers; give a complete checkpoint",
        )
    if tensors is not None and model.can_generate():
        with quiet(), contextlib.suppress(OSError):
            model.generation_config = transformers.GenerationConfig.from_pretrained(source)
    return model.eval()


def other_package(error: ImportError, source: str) -> MissingDependencyError:
    """Return what says which package transformers lacks for a model (a tower of timm, say), from its own words."""
    return MissingDependencyError(
        f"transformers cannot make the model at {source} ({reason_of(error)})",
        remedy=next(iter(re.findall(r"pip install [\w-]+", str(error))), "install the package that it names"),
    )


def class_of(config: Any) -> Any:
    """Return the class of transformers that a model with this configuration is of."""
    _, transformers = import_export_packages()
    task = TASKS[task_of_config(config) or ENCODER.name]
    return task.class_of(config, transformers)


def _states(tensors: Mapping[str, Expression] | None, evaluate: bool) -> dict[str, Any]:
    if tensors is None:
        return {}
    torch, _ = import_export_packages()
    weights = {name: tensor for name, tensor in tensors.items() if tensor.dtype.is_floating_point()}
    # Integers are no weights but tables, which a trace indexes: no expression is known of what comes out.
    tables = {name: torch.from_numpy(np.array(tensors[name].numpy())) for name in tensors.keys() - weights.keys()}
    if not evaluate:
        return {"state_dict": lazy_tensors(weights) | tables}
    arrays = {name: tensor.numpy().astype(np.float32) for name, tensor in weights.items()}
    return {"state_dict": {name: torch.from_numpy(array) for name, array in arrays.items()} | tables}


def task_of_config(config: Any) -> str | None:
    """Return what kind of model a configuration of transformers is of; ``None`` for one that graphopt does not take."""
    _, transformers = import_export_packages()
    return next((name for name, task in TASKS.items() if task.takes_config(config, transformers)), None)


def check_config(config: Any, source: str) -> None:
    """Refuse a configuration that is neither of a causal language model nor of an encoder.

    Raises:
        InputError: it is neither.
    """
    if task_of_config(config) is None:
        _, transformers = import_export_packages()
        architectures = ", ".join(getattr(config, "architectures", None) or ()) or type(config).__name__
        if type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
            text_classes = ", ".join(classes_of(type(config), transformers.MODEL_FOR_CAUSAL_LM_MAPPING))
            raise InputError(
                f"{architectures} reads images beside a text in a way that graphopt makes no graph of",
                file=source,
                remedy="docs/vision-language.md says which models with images enter"
                + (
                    f"; its text part enters where it is saved alone, as a checkpoint of {text_classes}"
                    * bool(text_classes)
                ),
            )
        raise InputError(
            f"{architectures} is none of the kinds of models that graphopt takes",
            file=source,
            remedy="graphopt takes decoder-only models, those that transformers loads with AutoModelForCausalLM, and "
            "encoders such as BERT, alone or with a head for classes of texts or tokens or for questions, and "
            "encoder-decoders that make texts, such as T5 and Whisper, and models of images and "
            "recordings: classifiers, encoders, detectors, segmenters, and what writes speech down",
        )


def save_companions(source: str, model: Any, folder: Path, **tokenizer_options: str) -> list[Fact]:
    """Write configuration and tokenizer of ``model`` as transformers saves them, and return notes on what is missing.

    Args:
        source: a folder, or the id of a model on the hub.
        model: the model; its configuration is written if it is not ``None``.
        folder: where to write ``tokenizer.json``, ``config.json`` and the like.
        tokenizer_options: in which file of ``source`` the tokenizer is, as transformers takes it (``gguf_file``).
    """
    _, transformers = import_export_packages()
    with quiet():
        if model is not None:
            model.config.save_pretrained(folder)
            if getattr(model, "generation_config", None) is not None:
                model.generation_config.save_pretrained(folder)
            task = TASKS[task_of_config(model.config) or ENCODER.name]
            _save_settings(source, folder, task.files)
            if task.reads != "texts":
                return []
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False, **tokenizer_options)
            tokenizer.save_pretrained(folder)
        except Exception as error:
            return [NO_TOKENIZER(why=NOT_LOADED(error=reason_of(error)))]
    if not (folder / "tokenizer.json").is_file():
        return [NO_TOKENIZER(why=NOT_WRITTEN())]
    return []


def has_pooling(source: str) -> bool:
    """Return whether sentence-transformers makes embeddings of a model by pooling its hidden states."""
    file = _settings_file(source, MODULES)
    return file is not None and any(module.kind == "Pooling" for module in modules_of(file))


def _settings_file(source: str, name: str) -> Path | None:
    """Return a file of a folder, or of a model on the hub; ``None`` where it has none of this name."""
    if Path(source).is_dir():
        return Path(source) / name if (Path(source) / name).is_file() else None
    _, transformers = import_export_packages()
    with contextlib.suppress(OSError):
        file = transformers.utils.cached_file(source, name, _raise_exceptions_for_missing_entries=False)
        return None if file is None else Path(file)
    return None


def _save_settings(source: str, folder: Path, also: Sequence[str]) -> None:
    """Copy what sentence-transformers says of a model on the hub, how sound and images become numbers, and ``also``."""
    modules = _settings_file(source, MODULES)
    names = [POOLING, SENTENCES, MODULES, PROMPTS, PREPROCESSOR, PROCESSOR, *also]
    names += [] if modules is None else [name for module in modules_of(modules) for name in module.files]
    for name in dict.fromkeys(names):
        file = _settings_file(source, name)
        if file is not None:
            (folder / name).parent.mkdir(exist_ok=True, parents=True)
            shutil.copyfile(file, folder / name)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep warnings, log lines below errors, progress bars and prints of torch and transformers off the terminal.

    What goes wrong is raised, not printed, so nothing is lost.
    """
    bars = importlib.import_module("transformers.utils.logging")
    has_bars, level = bars.is_progress_bar_enabled(), logging.root.manager.disable
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.disable(max(level, logging.WARNING))
        bars.disable_progress_bar()
        try:
            yield
        finally:
            logging.disable(level)
            if has_bars:
                bars.enable_progress_bar()


def reason_of(error: BaseException) -> str:
    """Return the first line of the innermost cause of ``error``: libraries wrap theirs in pages of advice."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
