"""What a front asks for, as a turn of the Engine; or why it cannot be had."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from graphopt.artifact.genai import GENAI_CONFIG
from graphopt.artifact.hf_config import GENERATION_CONFIG, json_object
from graphopt.artifact.manifest import read_manifest
from graphopt.artifact.tokens import TOKENIZER, beginning_of, read_tokenizer
from graphopt.errors import InputError
from graphopt.inference.decoding.grammar import JSON_STYLE, Grammar
from graphopt.serving.stream import Turn

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_NEUTRAL_VALUES = {
    "n": (1, "choices"),
    "best_of": (1, "choices"),
    "frequency_penalty": (0, "frequency penalties"),
    "presence_penalty": (0, "presence penalties"),
    "min_p": (0, "min_p"),
    "use_beam_search": (False, "beam search"),
    "length_penalty": (1, "length penalties"),
    "logit_bias": (None, "logit biases"),
}
"""Settings that the Engine does not know: the value that asks for nothing, and what they are called."""


@dataclass(frozen=True)
class Limits:
    """What the graph of a folder can take.

    Attributes:
        positions: tokens of a request at most.
        vocabulary: token ids end before it.
        block: tokens of a block.
        blocks: blocks of the pool.
        requests: requests at once.
        tokens: tokens that one call of the model takes.
        beginning: what the tokenizer puts before every text.
        sampling: what ``generation_config.json`` says of sampling.
    """

    positions: int
    vocabulary: int
    block: int
    blocks: int
    requests: int
    tokens: int
    beginning: tuple[int, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of_folder(cls, folder: Path) -> Limits:
        """Read the configuration of a folder.

        Raises:
            InputError: it holds no graph that an engine can share among requests.
        """
        config = json_object(folder / GENAI_CONFIG)
        batching = config.get("engine", {}).get("dynamic_batching")
        if batching is None:
            raise _refusal(folder)
        model, tokenizer = config["model"], read_tokenizer(folder / TOKENIZER)
        return cls(
            min(model["context_length"], batching["num_blocks"] * batching["block_size"]),
            model["vocab_size"],
            batching["block_size"],
            batching["num_blocks"],
            batching["max_batch_size"],
            batching["max_scheduled_tokens"],
            () if tokenizer is None else beginning_of(tokenizer),
            json_object(folder / GENERATION_CONFIG),
        )


def _refusal(folder: Path) -> InputError:
    """Return why the Engine cannot run a folder: what its manifest says of the step `serve`, or that there was none."""
    from graphopt.artifact.artifact import NO_GENAI_CONFIG

    manifest = read_manifest(folder)
    skips = [skip for report in manifest.passes if report.name == "serve" for skip in report.skips]
    notes = [note for note in manifest.notes if note.code == NO_GENAI_CONFIG.code]
    reasons = [f"{skip.where}: {skip.reason}" for skip in skips] or [str(note) for note in notes]
    if not any(report.name == "serve" for report in manifest.passes) or not reasons:
        return InputError(
            "this model's graph takes one batch at a time",
            file=folder,
            remedy="make one that requests share: `graphopt optimize FOLDER --add serve -o SERVED`",
        )
    return InputError(
        f"this model's graph takes one batch at a time, and the step serve could not change that: {'; '.join(reasons)}",
        file=folder,
        remedy="talk with it by `graphopt run`, which needs no engine",
    )


def tokens_of(request: Mapping[str, Any], limits: Limits) -> tuple[int, ...]:
    """Return the tokens that a request continues, as every text of the model begins.

    A chat template writes that beginning; the front tokenizes the text of a completion without it.

    Raises:
        ValueError: there is none, one is outside the vocabulary, or they leave no position for another.
    """
    tokens = tuple(request.get("token_ids") or ())
    if request.get("multi_modal_data"):
        raise ValueError("this model reads text only")
    if not tokens:
        raise ValueError("the prompt has no token")
    if not all(0 <= token < limits.vocabulary for token in tokens):
        wrong = next(token for token in tokens if not 0 <= token < limits.vocabulary)
        raise ValueError(f"the token {wrong} is outside the vocabulary of {limits.vocabulary} tokens")
    if tokens[: len(limits.beginning)] != limits.beginning:
        tokens = (*limits.beginning, *tokens)
    if len(tokens) >= limits.positions:
        raise ValueError(
            f"the prompt has {len(tokens)} tokens, and prompt and reply together have {limits.positions} at most"
        )
    return tokens


def turn_of(
    request: Mapping[str, Any], limits: Limits, tokens: Sequence[int], prompt: int | None = None, seed: int = 0
) -> Turn:
    """Return what a request asks for.

    Args:
        request: Dynamo's request of tokens.
        limits: what the model can take.
        tokens: what it continues.
        prompt: how many of them are the prompt; the others were made before. All by default.
        seed: of the random numbers, where the request has none.

    Raises:
        ValueError: the Engine cannot do it.
        InputError: the form of the reply is none.
    """
    sampling = request.get("sampling_options") or {}
    stop = request.get("stop_conditions") or {}
    _check_offered(sampling, request.get("output_options") or {})
    begin = len(tokens) if prompt is None else prompt
    prior = len(tokens) - begin
    room = limits.positions - begin
    max_tokens = stop.get("max_tokens")
    defaults = limits.sampling if limits.sampling.get("do_sample") else {}

    def option(name: str, fallback: Any) -> Any:
        value = sampling.get(name)
        return defaults.get(name, fallback) if value is None else value

    limit = room if max_tokens is None else min(room, max_tokens + prior)
    return Turn(
        tuple(tokens[:begin]),
        limit,
        tuple(tokens[begin:]),
        min_tokens=limit if stop.get("ignore_eos") else min(limit, (stop.get("min_tokens") or 0) + prior),
        temperature=float(option("temperature", 1.0)),
        top_k=max(0, int(option("top_k", 0))),
        top_p=float(option("top_p", 1.0)),
        seed=seed,
        repetition_penalty=float(option("repetition_penalty", 1.0)),
        guidance=_guidance(sampling.get("guided_decoding")),
    )


def _check_offered(sampling: Mapping[str, Any], output: Mapping[str, Any]) -> None:
    for name, (neutral, title) in _NEUTRAL_VALUES.items():
        if sampling.get(name) not in (None, neutral):
            raise ValueError(f"{title} are not offered: {name}={sampling[name]}")
    if output.get("logprobs") is not None or output.get("prompt_logprobs") is not None:
        raise ValueError("log probabilities are not offered")


def _guidance(decoding: Mapping[str, Any] | None) -> tuple[str, str] | None:
    options = {name: value for name, value in (decoding or {}).items() if value is not None}
    if "json" in options:
        return "json_schema", _json_schema(options["json"])
    if "regex" in options:
        return "regex", str(options["regex"])
    if "choice" in options:
        return "regex", "|".join(re.escape(choice) for choice in options["choice"])
    if "grammar" in options:
        return "lark_grammar", str(options["grammar"])
    if options.keys() - {"backend", "whitespace_pattern"}:
        raise ValueError(f"this form of a reply is not offered: {', '.join(sorted(options))}")
    return None


def _json_schema(text: Any) -> str:
    """Return a schema as JSON, with the style of JSON that it may state itself."""
    schema = json.loads(Grammar.json_schema(text).text)
    if isinstance(schema, dict):
        schema["x-guidance"] = JSON_STYLE | schema.get("x-guidance", {})
    return json.dumps(schema)
