from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphopt.graph.diagnostics import RULES, Fact, Rule

SCALARS = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8) | st.floats(-1e9, 1e9)
PACKED_RULE = Rule(
    "tests.packed", "{weight} as {format} of shape {shape!r}", also=["rows"], scales=", {count} {scales}"
)
WHY_RULE = Rule("tests.why", "it stays: {why}")


@pytest.fixture(autouse=True)
def _forget_new_rules() -> object:
    before = dict(RULES)
    yield
    RULES.clear()
    RULES.update(before)


def test_a_fact_carries_its_figures_and_its_rule_the_words() -> None:
    fact = PACKED_RULE(weight="up.weight", format="int4", shape=[4, 8], rows=4)
    assert (fact.code, fact.figures["shape"]) == ("tests.packed", [4, 8])
    assert str(fact) == "up.weight as int4 of shape [4, 8]"


def test_a_clause_stands_where_its_figure_does() -> None:
    assert str(PACKED_RULE(weight="w", format="int4", shape=[1], scales="scales", count=2)) == (
        "w as int4 of shape [1], 2 scales"
    )
    assert str(PACKED_RULE(weight="w", format="int4", shape=[1], scales=None)) == "w as int4 of shape [1]"


@pytest.mark.parametrize(
    ("figures", "message"),
    [({}, "missing figures \\['why'\\]"), ({"why": "a", "who": "b"}, "unknown figures \\['who'\\]")],
)
def test_figures_that_the_rule_does_not_name_are_refused(figures: dict[str, str], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        WHY_RULE(**figures)


def test_figures_that_are_no_json_are_refused() -> None:
    with pytest.raises(TypeError, match="the figure why holds what is no JSON"):
        WHY_RULE(why=[object()])  # type: ignore[list-item]


def test_a_code_belongs_to_one_rule_and_has_one_form() -> None:
    with pytest.raises(ValueError, match="two rules have the code tests.why"):
        Rule("tests.why", "another sentence")
    with pytest.raises(ValueError, match="not of the form"):
        Rule("no dot", "a sentence")


@given(st.dictionaries(st.text(min_size=1, max_size=8), SCALARS | st.lists(SCALARS, max_size=3), max_size=4))
def test_facts_come_back_from_json_as_they_went(figures: dict[str, object]) -> None:
    inner = Fact(code="tests.why", figures={"why": "a reason"})
    fact = Fact(code="tests.any", figures={**figures, "because": inner, "several": [inner, inner]})  # type: ignore[dict-item]
    back = Fact.model_validate_json(fact.model_dump_json())
    assert back == fact
    assert json.loads(back.model_dump_json()) == json.loads(fact.model_dump_json())


def test_a_fact_is_no_sentence() -> None:
    fact = WHY_RULE(why="a")
    assert fact == WHY_RULE(why="a")
    assert hash(fact) == hash(WHY_RULE(why="a"))
    assert fact not in (WHY_RULE(why="b"), "it stays: a")


def test_facts_inside_facts_are_said_with_them() -> None:
    fact = WHY_RULE(why=[WHY_RULE(why="a"), WHY_RULE(why="b")])
    assert str(fact) == "it stays: it stays: a; it stays: b"
    assert str(Fact.model_validate_json(fact.model_dump_json())) == str(fact)
    assert str(Rule("tests.and", "{names:and}")(names=["a", "b"])) == "a and b"


def test_a_code_that_is_not_known_is_shown_with_its_figures() -> None:
    assert str(Fact(code="later.version", figures={"group": 32, "why": WHY_RULE(why="x")})) == (
        "later.version (group 32, why it stays: x)"
    )


def test_a_figure_that_a_file_lacks_is_a_question_mark() -> None:
    assert str(Fact(code="tests.why")) == "it stays: ?"
