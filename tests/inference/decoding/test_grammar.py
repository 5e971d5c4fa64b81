from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path

import pytest

from graphopt.errors import InputError, MissingDependencyError
from graphopt.inference.decoding.grammar import Grammar
from graphopt.inference.decoding.proposers import Chain, GrammarProposer, Lookup
from graphopt.inference.decoding.sampling import Sampling
from graphopt.inference.decoding.speculation import Speculation
from graphopt.inference.generation import generate, stream
from graphopt.inference.session import Session, load

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Ada", "Été 😀"]},
        "age": {"type": "integer"},
        "tags": {"const": []},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def session(shipped_artifact: Path) -> Session:
    return load(shipped_artifact, threads=1)


@pytest.mark.parametrize("seed", range(4))
def test_what_is_drawn_is_what_the_schema_describes(session: Session, seed: int) -> None:
    # Hot: without the grammar hardly a character would be in its place.
    sampling = Sampling(temperature=3.0, seed=seed)
    grammar = Grammar.json_schema(SCHEMA)
    completion = generate(session, "x = ", max_new_tokens=200, sampling=sampling, grammar=grammar)[0]
    assert completion.stopped == "end of text"
    person = json.loads(completion.text or "")
    assert person["name"] in ("Ada", "Été 😀")
    assert isinstance(person["age"], int)
    assert set(person) <= {"name", "age", "tags"}
    # as json.dumps writes it
    assert completion.text == json.dumps(person, ensure_ascii=False)


def test_what_a_schema_forces_is_drafted(session: Session) -> None:
    sampling, grammar = Sampling(temperature=3.0, seed=1), Grammar.json_schema(SCHEMA)
    # onnxruntime's products may differ in their last bits; no two tokens are that close here
    speculation = Speculation(Chain(GrammarProposer(), Lookup()), 7)
    plain = generate(session, "x = ", max_new_tokens=60, sampling=sampling, grammar=grammar)
    assert (
        generate(session, "x = ", max_new_tokens=60, sampling=sampling, grammar=grammar, proposer=speculation) == plain
    )
    assert sum(right for (source, _), right in speculation.stats.right.items() if source == "grammar") >= 3


def test_rows_of_a_batch_each_have_their_own_place_in_the_grammar(session: Session) -> None:
    grammar, prompts = Grammar.regex("[0-9]{3}-[a-f]{2,4};"), ["a", "number = ", "id: "]
    completions = generate(session, prompts, max_new_tokens=30, grammar=grammar)
    assert all(re.fullmatch("[0-9]{3}-[a-f]{2,4};", row.text or "") for row in completions)
    assert [row.stopped for row in completions] == ["end of text"] * 3
    assert completions == [generate(session, prompt, max_new_tokens=30, grammar=grammar)[0] for prompt in prompts]


def test_without_an_end_of_text_the_grammar_ends_it(session: Session) -> None:
    facts = session.manifest.model.model_copy(update={"eos_token_ids": []})
    endless = dataclasses.replace(session, manifest=session.manifest.model_copy(update={"model": facts}))
    completion = generate(endless, "a", grammar=Grammar.regex("yes|no"))[0]
    assert completion.text in ("yes", "no")
    assert completion.stopped == "end of text"


def test_a_grammar_that_allows_anything_changes_nothing(session: Session) -> None:
    free = generate(session, "def f(x):", max_new_tokens=20)[0]
    assert generate(session, "def f(x):", max_new_tokens=20, grammar=Grammar.regex("(?s:.*)"))[0].text == free.text


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Grammar.json_schema("{"), "the JSON schema is not JSON"),
        (lambda: Grammar.json_schema("[1]"), r"an object or a boolean, and this is \[1\]"),
        (lambda: Grammar.json_schema({"type": "nonsense"}), "the JSON schema cannot be used: .*nonsense"),
        (lambda: Grammar.json_schema({"$ref": "#/nowhere"}), "the JSON schema cannot be used: .*nowhere"),
        (lambda: Grammar.regex("(a"), "the regular expression cannot be used: .*unclosed"),
    ],
)
def test_what_is_no_grammar_is_refused_at_once(session: Session, make, message: str) -> None:
    with pytest.raises(InputError, match=message):
        stream(session, "a", grammar=make())


def test_without_llguidance_or_tokenizer(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"no tokenizer\.json"):
        generate(dataclasses.replace(session, tokenizer=None), [[1]], grammar=Grammar.regex("a"))
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingDependencyError, match=r'needs llguidance, which is not installed.*"graphopt\[chat\]"'):
        generate(session, "a", grammar=Grammar.regex("a"))
