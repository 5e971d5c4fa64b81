"""Exercises that models complete: made of text that ships with Python, judged by exact match."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from graphopt import cli
from graphopt.errors import InputError
from graphopt.quality.exact_match import KINDS, exact_matches, exercises, is_exact
from graphopt.report.tables import quality_table


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_exercises_are_the_same_for_the_same_seed_and_end_before_the_answer(kind: str) -> None:
    first, same_seed, other_seed = (list(exercises(kind, 4, seed)) for seed in (0, 0, 1))
    assert first == same_seed != other_seed
    for exercise in first:
        examples, _, question = exercise.prompt.rpartition("\n\n")
        assert examples
        assert question
        assert not exercise.prompt.endswith((" ", "\n", exercise.answer))


def test_answers_follow_from_what_is_asked() -> None:
    for exercise in exercises("copy", 4):
        assert f"Text: {exercise.answer}\nCopy:" in exercise.prompt
    for exercise in exercises("lookup", 4):
        question = exercise.prompt.rpartition("\n\n")[2]
        word = re.findall(r"The value of (\w+) is$", question)[0]
        assert f"{word} = {exercise.answer}\n" in question
    for exercise in exercises("arithmetic", 4):
        first, second = re.findall(r"(\d+) \+ (\d+) =$", exercise.prompt)[0]
        assert int(first) + int(second) == int(exercise.answer)
    for exercise in exercises("json", 4):
        record = json.loads(exercise.answer)
        question = exercise.prompt.rpartition("\n\n")[2]
        assert all(str(value) in question for value in record.values())
        assert list(json.loads(re.findall("Schema: (.*)", question)[0])) == list(record)


def test_only_the_first_line_counts_and_json_may_have_other_spaces() -> None:
    assert is_exact("copy", " as it is\nText: more", "as it is")
    assert not is_exact("copy", "as it was", "as it is")
    assert is_exact("json", '{"value":1,  "name":"x"}', '{"name": "x", "value": 1}')
    assert not is_exact("json", '{"name": "x", "value": 2}', '{"name": "x", "value": 1}')
    assert not is_exact("json", '{"name": ', '{"name": "x"}')


def test_the_table_has_a_column_for_each_kind(
    shipped_artifact: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ("table", shipped_artifact, "small-rtn", "--tokens", 64, "--exercises", 1, "--json")
    monkeypatch.setattr(sys, "argv", ["graphopt", *map(str, command)])
    with pytest.raises(SystemExit):
        cli.main()
    (row,) = json.loads(capsys.readouterr().out)
    for kind in KINDS:
        assert row[f"exact_{kind}"] in (0, 1)
        assert row[f"reference_exact_{kind}"] in (0, 1)
    table = quality_table([("float", {"exact_copy": 0.5}), ("small", {"kl_mean": 0.01, "tokens": 1, "exact_copy": 0})])
    assert "copy" in table.headings
    assert table.rows[0][-1] == ""  # a model beside itself has no verdict


def test_a_model_of_few_positions_is_refused(llama_artifact: Path) -> None:
    with pytest.raises(InputError, match="positions"):
        exact_matches(llama_artifact, 1)
