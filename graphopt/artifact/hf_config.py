"""What an app must know about a model and its graph does not say, read from the files of its folder."""

from __future__ import annotations

import json
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

SENTENCES = "sentence_bert_config.json"
"""Where sentence-transformers keeps how long a text may be."""


Pooling = Literal["cls", "mean", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
"""How hidden states become one embedding, by the names of sentence-transformers."""

_SWITCHES = {"mean_tokens": "mean", "cls_token": "cls", "max_tokens": "max", "weightedmean_tokens": "weightedmean"}

POOLING = "1_Pooling/config.json"
"""Where sentence-transformers keeps how a model pools."""


class ModelFacts(BaseModel):
    """What an app must know about the model and cannot read from its graph; ``None`` where the checkpoint has no value.

    Attributes:
        architecture: the class of transformers.
        max_positions: tokens of a sequence at most.
        bos_token_id: the token that begins a text.
        eos_token_ids: the tokens that end one.
        pad_token_id: the token that fills up short texts.
        pooling: of an encoder, how hidden states become an embedding; several are concatenated; none: their mean.
        labels: of a classifier, the names of its classes in order.
        are_labels_independent: of a classifier, whether a text may be of several classes at once.
    """

    architecture: str | None = None
    max_positions: int | None = None
    bos_token_id: int | None = None
    eos_token_ids: list[int] = []
    pad_token_id: int | None = None
    pooling: list[Pooling] = []
    labels: list[str] = []
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
        pooling=pooling_of(folder / POOLING),
    )


def facts_of_encoder(folder: Path) -> ModelFacts:
    """Read what an app must know of an encoder, as :func:`facts_of_config` does.

    Its positions are also bounded by ``model_max_length`` of its tokenizer and ``max_seq_length`` of
    sentence-transformers: RoBERTa's ``max_position_embeddings`` of 514 counts two rows that no token uses.
    """
    facts = facts_of_config(folder)
    bounds = [
        facts.max_positions,
        json_object(folder / "tokenizer_config.json").get("model_max_length"),
        json_object(folder / SENTENCES).get("max_seq_length"),
    ]
    return facts.model_copy(update={"max_positions": min((b for b in bounds if isinstance(b, int)), default=None)})


def facts_of_classifier(folder: Path) -> ModelFacts:
    """Read what an app must know of a classifier: as of an encoder, and the names of classes."""
    config = json_object(folder / "config.json")
    names = config.get("id2label") or {}
    return facts_of_encoder(folder).model_copy(
        update={
            "labels": [str(names[key]) for key in sorted(names, key=int)],
            "are_labels_independent": config.get("problem_type") == "multi_label_classification",
        }
    )


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
