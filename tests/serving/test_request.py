"""What a front asks for: refused, or a turn of the Engine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from graphopt.errors import InputError
from graphopt.inference.decoding.grammar import JSON_STYLE
from graphopt.serving.request import Limits, tokens_of, turn_of
from graphopt.serving.worker import offered_by
from tests.serving.conftest import BLOCKS

LIMITS = Limits(positions=64, vocabulary=100, block=16, blocks=8, requests=4, tokens=32)


def test_limits_are_read_from_the_folder(served_folder: Path, narrow: Path, shipped_artifact: Path) -> None:
    limits = Limits.of_folder(served_folder)
    assert (limits.positions, limits.vocabulary, limits.block, limits.beginning) == (1024, 4096, 16, (0,))
    # a request that the whole pool cannot hold can never end
    assert Limits.of_folder(narrow).positions == BLOCKS * 16
    with pytest.raises(InputError, match="one batch at a time.*--add serve"):
        Limits.of_folder(shipped_artifact)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"token_ids": []}, "no token"),
        ({"token_ids": [1, 100]}, "token 100 is outside the vocabulary of 100"),
        ({"token_ids": [-1]}, "token -1 is outside"),
        ({"token_ids": [1] * 64}, "64 tokens, and prompt and reply together have 64"),
        ({"token_ids": [1], "multi_modal_data": {"image": []}}, "text only"),
        ({"token_ids": [1], "sampling_options": {"n": 2}}, "choices are not offered: n=2"),
        ({"token_ids": [1], "sampling_options": {"best_of": 3}}, "best_of=3"),
        ({"token_ids": [1], "sampling_options": {"presence_penalty": 0.5}}, "presence_penalty=0.5"),
        ({"token_ids": [1], "sampling_options": {"frequency_penalty": 0.5}}, "frequency_penalty=0.5"),
        ({"token_ids": [1], "sampling_options": {"min_p": 0.1}}, "min_p=0.1"),
        ({"token_ids": [1], "sampling_options": {"logit_bias": {"5": 1}}}, "logit_bias"),
        ({"token_ids": [1], "output_options": {"logprobs": 0}}, "log probabilities"),
        ({"token_ids": [1], "sampling_options": {"guided_decoding": {"structural_tag": "x"}}}, "structural_tag"),
    ],
)
def test_what_cannot_be_done_is_refused(request_: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        turn_of(request_, LIMITS, tokens_of(request_, LIMITS))


def test_a_turn_is_what_was_asked_for() -> None:
    sampling = {"temperature": 0.5, "top_k": -1, "top_p": 0.9, "n": 1, "presence_penalty": 0.0, "logit_bias": None}
    request = {"sampling_options": sampling, "stop_conditions": {"max_tokens": 5, "min_tokens": 2}}
    turn = turn_of(request, LIMITS, [1, 2, 3], seed=9)
    assert (turn.prompt, turn.prior_tokens, turn.limit, turn.min_tokens, turn.seed) == ((1, 2, 3), (), 5, 2, 9)
    assert (turn.temperature, turn.top_k, turn.top_p) == (0.5, 0, 0.9)
    # moved from another worker, which made two tokens: the front counts them off
    second_turn = turn_of({**request, "stop_conditions": {"max_tokens": 3}}, LIMITS, [1, 2, 3, 4, 5], prompt=3)
    assert (second_turn.prompt, second_turn.prior_tokens, second_turn.limit) == ((1, 2, 3), (4, 5), 5)
    # no more than there are positions; no end of text before
    assert turn_of({"stop_conditions": {"ignore_eos": True}}, LIMITS, [1, 2, 3]).min_tokens == 61


def test_a_text_begins_as_the_tokenizer_begins_it() -> None:
    limits = replace(LIMITS, beginning=(7,))
    assert tokens_of({"token_ids": [1, 2]}, limits) == (7, 1, 2)
    # as chat templates write it
    assert tokens_of({"token_ids": [7, 1, 2]}, limits) == (7, 1, 2)
    with pytest.raises(ValueError, match="64 tokens"):
        tokens_of({"token_ids": [1] * 63}, limits)


def test_sampling_is_the_model_makers_where_the_client_says_nothing() -> None:
    maker = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    turn = turn_of({}, replace(LIMITS, sampling=maker), [1])
    assert (turn.temperature, turn.top_k, turn.top_p) == (0.6, 20, 0.95)
    greedy_turn = turn_of({"sampling_options": {"temperature": 0.0}}, replace(LIMITS, sampling=maker), [1])
    assert greedy_turn.temperature == 0
    # as OpenAI's API says
    assert turn_of({}, LIMITS, [1]).temperature == 1
    assert turn_of({}, replace(LIMITS, sampling={**maker, "do_sample": False}), [1]).temperature == 1


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ({"json": {"type": "object"}}, ("json_schema", json.dumps({"type": "object", "x-guidance": JSON_STYLE}))),
        ({"json": "{}", "regex": None}, ("json_schema", json.dumps({"x-guidance": JSON_STYLE}))),
        ({"json": "true"}, ("json_schema", "true")),
        ({"regex": "a+"}, ("regex", "a+")),
        ({"choice": ["a.b", "c"]}, ("regex", r"a\.b|c")),
        ({"grammar": "start: /a/"}, ("lark_grammar", "start: /a/")),
        ({"backend": "auto"}, None),
        (None, None),
    ],
)
def test_forms_of_replies(form: dict[str, Any] | None, expected: tuple[str, str] | None) -> None:
    assert turn_of({"sampling_options": {"guided_decoding": form}}, LIMITS, [1]).guidance == expected


def test_a_model_without_a_template_offers_no_chat(served_folder: Path, shipped_artifact: Path) -> None:
    assert offered_by(served_folder) == ["chat", "completions"]
    assert offered_by(shipped_artifact) == ["completions"]
