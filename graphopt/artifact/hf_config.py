"""What an app must know about a model and its graph does not say, read from the files of its folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from pydantic import BaseModel

from graphopt.analysis.structure.ports import MAX_POSITIONS
from graphopt.errors import InputError
from graphopt.tasks import TASKS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


GENERATION_CONFIG = "generation_config.json"
"""Where transformers keeps which tokens end a text, and how its maker recommends to draw them."""

PREPROCESSOR = "preprocessor_config.json"
"""Where transformers keeps how a recording becomes features, and an image numbers."""

PROCESSOR = "processor_config.json"
"""Where newer versions keep it, beside how they go with texts."""

SENTENCES = "sentence_bert_config.json"
"""Where sentence-transformers keeps how long a text may be."""


Pooling = Literal["cls", "mean", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
"""How hidden states become one embedding, by the names of sentence-transformers."""

_SWITCHES = {"mean_tokens": "mean", "cls_token": "cls", "max_tokens": "max", "weightedmean_tokens": "weightedmean"}

POOLING = "1_Pooling/config.json"
"""Where sentence-transformers keeps how a model pools, unless its :data:`MODULES` name another folder."""

MODULES = "modules.json"
"""Where sentence-transformers lists what a text goes through: the model, pooling, dense layers, normalization."""

PROMPTS = "config_sentence_transformers.json"
"""Where sentence-transformers keeps what is put in front of texts, by the purpose of their embeddings."""

DENSE_FILES = "dense_*.safetensors"
"""The names of weights of dense layers in an artifact."""

_DENSE_WEIGHTS = "model.safetensors"
Activation = Literal["identity", "tanh"]
_ACTIVATIONS: dict[str, Activation] = {"Identity": "identity", "Tanh": "tanh"}


class DenseLayer(BaseModel):
    """A product behind the pooling: ``activation(W x + b)``.

    Attributes:
        file: the safetensors file beside the model that holds ``linear.weight`` [out, in], and perhaps ``linear.bias``.
        activation: what is applied to the sum.
    """

    file: str
    activation: Activation


class ModelFacts(BaseModel):
    """What an app must know about the model and cannot read from its graph; ``None`` where the checkpoint has no value.

    Attributes:
        architecture: the class of transformers.
        max_positions: tokens of a sequence at most.
        bos_token_id: the token that begins a text.
        eos_token_ids: the tokens that end one.
        pad_token_id: the token that fills up short texts.
        pooling: of an encoder, how hidden states become an embedding; several are concatenated; none: their mean.
        prompts: of an encoder, what is put in front of texts, by the purpose of their embeddings, such as ``query``.
        default_prompt: the name of the prompt of a text whose purpose is not given.
        dense: of an encoder, the layers behind the pooling.
        is_normalized: of an encoder, whether an embedding is divided by its length.
        decoder_start: of an encoder-decoder, the tokens that its texts begin with.
        languages: of an encoder-decoder that finds out the language of its source, the token of each by its name.
        decoder_task: the tokens behind that of the language.
        image_token_id: of a vision-language model, the token whose places features of images take.
        vision_start_token_id: the token in front of those, where there is one.
        suppressed_tokens: of an encoder-decoder, tokens that no text has.
        suppressed_at_first: of an encoder-decoder, tokens that are not the first behind the beginning.
        labels: of a classifier, the names of its classes in order.
        are_labels_independent: of a classifier, whether a text may be of several classes at once.
    """

    architecture: str | None = None
    max_positions: int | None = None
    bos_token_id: int | None = None
    eos_token_ids: list[int] = []
    pad_token_id: int | None = None
    pooling: list[Pooling] = []
    prompts: dict[str, str] = {}
    default_prompt: str | None = None
    dense: list[DenseLayer] = []
    is_normalized: bool = False
    labels: list[str] = []
    decoder_start: list[int] = []
    languages: dict[str, int] = {}
    decoder_task: list[int] = []
    image_token_id: int | None = None
    vision_start_token_id: int | None = None
    suppressed_tokens: list[int] = []
    suppressed_at_first: list[int] = []
    are_labels_independent: bool = False


def with_positions(facts: ModelFacts, metadata: Mapping[str, str]) -> ModelFacts:
    """Return ``facts`` with the positions that the metadata of the graph states, where a pass changed them."""
    positions = metadata.get(MAX_POSITIONS)
    return facts if positions is None else facts.model_copy(update={"max_positions": int(positions)})


def facts_of(folder: Path, task: str) -> ModelFacts:
    """Read what an app must know about a model of this kind from the files of its folder."""
    facts: ModelFacts = TASKS[task].facts(folder)
    return facts


def facts_of_config(folder: Path) -> ModelFacts:
    """Read what an app must know from the ``config.json`` and ``generation_config.json`` of a Hugging Face folder.

    What they do not say, the ``genai_config.json`` of a folder of onnxruntime-genai may.
    """
    genai = json_object(folder / "genai_config.json").get("model", {})
    config = json_object(folder / "config.json")
    generation = json_object(folder / GENERATION_CONFIG)
    text = config | config.get("text_config", {}) or genai | {"max_position_embeddings": genai.get("context_length")}
    eos = generation.get("eos_token_id", text.get("eos_token_id"))
    return ModelFacts(
        architecture=next(iter(config.get("architectures") or []), None),
        max_positions=text.get("max_position_embeddings", text.get("n_positions")),
        bos_token_id=generation.get("bos_token_id", text.get("bos_token_id")),
        eos_token_ids=[] if eos is None else eos if isinstance(eos, list) else [eos],
        pad_token_id=generation.get("pad_token_id", text.get("pad_token_id")),
    )


@dataclass(frozen=True)
class SentenceModule:
    """One of the modules that sentence-transformers sends a text through.

    Attributes:
        kind: its class, such as ``Pooling``.
        folder: where it keeps its settings, relative to the model; empty for the model itself.
    """

    kind: str
    folder: str

    @property
    def files(self) -> tuple[str, ...]:
        """The files of a module behind the model, relative to it."""
        names = {"Pooling": ("config.json",), "Dense": ("config.json", _DENSE_WEIGHTS)}.get(self.kind, ())
        return tuple(f"{self.folder}/{name}" for name in names)


def modules_of(file: Path) -> list[SentenceModule]:
    """Read :data:`MODULES`, in order; nothing where there is no such file.

    Raises:
        InputError: it is not a list of modules, or one lies outside of the folder.
    """
    if not file.is_file():
        return []
    try:
        modules = [
            SentenceModule(str(module["type"]).rpartition(".")[2], str(module["path"]))
            for module in json.loads(file.read_text(encoding="utf-8"))
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"the file does not list modules with type and path: {error}", file=file) from error
    for module in modules:
        if module.folder.startswith("/") or ".." in module.folder.split("/"):
            raise InputError(f"the module {module.kind} lies outside of the folder", file=file)
    return modules


def facts_of_sentences(folder: Path) -> dict[str, Any]:
    """Return what a folder says of embeddings of sentences, as fields of :class:`ModelFacts`.

    Raises:
        InputError: it names a module, a pooling or an activation that is not known.
    """
    modules = [module for module in modules_of(folder / MODULES) if module.kind not in ("Transformer", "CLIPModel")]
    settings = json_object(folder / PROMPTS)
    # The state of CLIP's last token is what it was trained to compare with pictures.
    is_text_tower = json_object(folder / "config.json").get("model_type") == "clip_text_model"
    facts: dict[str, Any] = {
        "pooling": pooling_of(folder / POOLING) or (["lasttoken"] if is_text_tower else []),
        "prompts": {name: prompt for name, prompt in (settings.get("prompts") or {}).items() if prompt},
        "default_prompt": settings.get("default_prompt_name"),
        "dense": [],
    }
    for module in modules:
        if module.kind == "Pooling":
            facts["pooling"] = pooling_of(folder / module.folder / "config.json")
        elif module.kind == "Normalize" and module is modules[-1]:
            facts["is_normalized"] = True
        elif module.kind == "Dense":
            facts["dense"].append(_dense_layer(folder, module, len(facts["dense"])))
        else:
            raise InputError(
                f"a text goes through the module {module.kind}, which is not known there",
                file=folder / MODULES,
                remedy="known are a Transformer, then Pooling, Dense layers, and Normalize at the end",
            )
    return facts


def dense_files(folder: Path) -> dict[str, Path]:
    """Return the weights of the dense layers of a folder of sentence-transformers, by their names in an artifact."""
    layers = [module for module in modules_of(folder / MODULES) if module.kind == "Dense"]
    return {_dense_name(number): folder / layer.folder / _DENSE_WEIGHTS for number, layer in enumerate(layers)}


def _dense_name(number: int) -> str:
    return f"dense_{number}.safetensors"


def _dense_layer(folder: Path, module: SentenceModule, number: int) -> DenseLayer:
    file = folder / module.folder / "config.json"
    function = str(json_object(file).get("activation_function", "")).rpartition(".")[2]
    if function not in _ACTIVATIONS:
        raise InputError(
            f"the activation {function or 'of the layer'} is not known",
            file=file,
            remedy=f"known are {', '.join(_ACTIVATIONS)}",
        )
    if not (file.parent / _DENSE_WEIGHTS).is_file():
        raise InputError(
            "the dense layer has no weights here",
            file=file.parent / _DENSE_WEIGHTS,
            remedy="save the model with a current version of sentence-transformers, which writes safetensors files",
        )
    return DenseLayer(file=_dense_name(number), activation=_ACTIVATIONS[function])


def facts_of_encoder(folder: Path) -> ModelFacts:
    """Read what an app must know of an encoder, as :func:`facts_of_config` does.

    Its positions are also bounded by ``model_max_length`` of its tokenizer and ``max_seq_length`` of
    sentence-transformers: RoBERTa's ``max_position_embeddings`` of 514 counts two rows that no token uses.
    """
    facts = facts_of_config(folder).model_copy(update=facts_of_sentences(folder))
    bounds = [
        facts.max_positions,
        json_object(folder / "tokenizer_config.json").get("model_max_length"),
        json_object(folder / SENTENCES).get("max_seq_length"),
    ]
    return facts.model_copy(update={"max_positions": min((b for b in bounds if isinstance(b, int)), default=None)})


def facts_of_signals(folder: Path) -> ModelFacts:
    """Read what an app must know of a model of images or recordings: the names of classes."""
    return facts_of_config(folder).model_copy(update=_classes_of(folder))


def facts_of_classifier(folder: Path) -> ModelFacts:
    """Read what an app must know of a classifier: as of an encoder, and the names of classes."""
    return facts_of_encoder(folder).model_copy(update=_classes_of(folder))


def _classes_of(folder: Path) -> dict[str, Any]:
    config = json_object(folder / "config.json")
    names = config.get("id2label") or {}
    return {
        "labels": [str(names[key]) for key in sorted(names, key=int)],
        "are_labels_independent": config.get("problem_type") == "multi_label_classification",
    }


def facts_of_seq2seq(folder: Path) -> ModelFacts:
    """Read what an app must know of an encoder-decoder: how a text begins too, and which tokens it never has.

    ``max_positions`` is of the text. T5 has none: its distances are counted in buckets.
    """
    config, generation = json_object(folder / "config.json"), json_object(folder / GENERATION_CONFIG)
    settings = config | generation
    first = settings.get("decoder_start_token_id", settings.get("bos_token_id"))
    languages = settings.get("lang_to_id") or {}
    # Whisper's: what to do, and that no times are written.
    task = [settings.get("task_to_id", {}).get("transcribe"), settings.get("no_timestamps_token_id")]
    forced_tokens = [settings.get("forced_bos_token_id")]
    if not languages:
        forced_tokens += [token for _, token in sorted(settings.get("forced_decoder_ids") or [])]
        forced_tokens += [token for token in task if token not in forced_tokens]
    bad_words = settings.get("bad_words_ids") or []
    positions = config.get("max_target_positions", config.get("max_position_embeddings"))
    return facts_of_config(folder).model_copy(
        update={
            "max_positions": positions,
            "decoder_start": [token for token in (first, *forced_tokens) if token is not None],
            "languages": {name.strip("<|>"): token for name, token in languages.items()},
            "decoder_task": [token for token in task if token is not None] if languages else [],
            "suppressed_tokens": sorted(
                {*(settings.get("suppress_tokens") or []), *(word[0] for word in bad_words if len(word) == 1)}
            ),
            "suppressed_at_first": settings.get("begin_suppress_tokens") or [],
        }
    )


def facts_of_vision_language(folder: Path) -> ModelFacts:
    """Read what an app must know of a vision-language model: which token stands for an image too."""
    config = json_object(folder / "config.json")
    image_token = config.get("image_token_id", config.get("image_token_index"))
    tokens = {"image_token_id": image_token, "vision_start_token_id": config.get("vision_start_token_id")}
    return facts_of_config(folder).model_copy(update=tokens)


def pooling_of(file: Path) -> list[Pooling]:
    """Read how a model of sentence-transformers pools, from its :data:`POOLING`; nothing where there is no such file.

    Raises:
        InputError: the file asks for a pooling that is not known.
    """
    config = json_object(file)
    mode = config.get("pooling_mode")
    names = [mode] if isinstance(mode, str) else mode if isinstance(mode, list) else None
    if names is None:
        # As older versions write it: one switch for each.
        switches = [
            key.removeprefix("pooling_mode_") for key, value in config.items() if value is True and "_mode_" in key
        ]
        names = [_SWITCHES.get(key, key) for key in switches]
    modes = [mode for mode in get_args(Pooling) if mode in names]
    if len(modes) != len(names):
        raise InputError(
            f"the pooling {', '.join(sorted(set(names) - set(modes)))} is not known",
            file=file,
            remedy=f"known are {', '.join(get_args(Pooling))}",
        )
    return modes


def json_object(file: Path) -> dict[str, Any]:
    """Return what a JSON file holds; nothing where it is absent or holds something else than an object.

    Raises:
        InputError: the file is not JSON.
    """
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"the file is not JSON: {error}", file=file) from error
    return content if isinstance(content, dict) else {}
