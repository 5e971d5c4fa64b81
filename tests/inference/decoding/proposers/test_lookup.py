from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from graphopt.inference.decoding.proposers import Chain, Lookup
from graphopt.inference.decoding.proposers.automaton import ROOT, SuffixAutomaton

TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=24), min_size=1, max_size=3)


def rows(*prompts: list[int]) -> Any:
    """What a proposer reads of rows whose prompts these are."""
    return [SimpleNamespace(prompt=prompt, tokens=[], forced=list) for prompt in prompts]


def occurrences(texts: list[list[int]], run: tuple[int, ...]) -> int:
    return sum(tuple(text[i : i + len(run)]) == run for text in texts for i in range(len(text) - len(run) + 1))


@given(TEXTS, st.randoms(use_true_random=False))
def test_the_automaton_counts_every_run_of_all_texts(texts: list[list[int]], random: Any) -> None:
    # Texts grow in turns, as rows of a batch do.
    automaton, ends, positions = SuffixAutomaton(), [ROOT] * len(texts), [0] * len(texts)
    turns = [number for number, text in enumerate(texts) for _ in text]
    random.shuffle(turns)
    for number in turns:
        ends[number] = automaton.extend(ends[number], texts[number][positions[number]])
        positions[number] += 1
    for text in texts:
        for begin in range(len(text)):
            state, length = ROOT, 0
            for end in range(begin, len(text)):
                state, length = automaton.walk(state, length, text[end])
                run = tuple(text[begin : end + 1])
                assert length == len(run)
                assert automaton.count[state] == occurrences(texts, run)
    assert len(automaton.length) <= max(1, 2 * sum(map(len, texts)))


@given(st.lists(st.integers(0, 2), min_size=1, max_size=30), st.integers(0, 3))
def test_a_walk_keeps_the_longest_end_that_occurred(text: list[int], token: int) -> None:
    automaton = SuffixAutomaton()
    automaton.extend_all(ROOT, text)
    state, length = ROOT, 0
    for next_token in [*text[-4:], token]:
        state, length = automaton.walk(state, length, next_token)
    ends = [tuple([*text[-4:], token][i:]) for i in range(len(text[-4:]) + 1)]
    assert length == max((len(end) for end in ends if occurrences([text], end)), default=0)


def draft_tokens(lookup: Any, prefix: list[int] | None = None, limit: int = 8) -> list[int]:
    return [guess.token for guess in lookup.propose([prefix or []], [limit])[0]]


def test_a_draft_is_what_followed_the_longest_match() -> None:
    lookup = Lookup()
    lookup.begin(rows([1, 2, 3, 4, 5, 6, 9, 3, 7, 7, 2, 3]))
    # 2, 3 was followed by 4; 3 alone by 4 and by 7
    assert draft_tokens(lookup) == [4, 5, 6, 9]
    lookup.commit(0, [4])
    assert draft_tokens(lookup) == [5, 6, 9, 3, 7, 7]  # up to twice the match of 3 tokens
    assert draft_tokens(lookup, limit=2) == [5, 6]
    assert draft_tokens(lookup, prefix=[5, 6]) == [9, 3, 7, 7, 2, 3, 4]
    assert draft_tokens(lookup, prefix=[8]) == []


def test_the_most_frequent_token_wins_and_its_share_is_its_chance() -> None:
    lookup = Lookup()
    lookup.begin(rows([1, 2, 1, 3, 1, 3, 1]))
    first = lookup.propose([[]], [4])[0][0]
    assert (first.token, first.source) == (3, "lookup")
    assert first.chance == 1.0  # the longest match, 3, 1, was always followed by 3: its one earlier place
    lookup.begin(rows([1, 2, 1, 3, 1, 3, 4, 1]))
    first = lookup.propose([[]], [4])[0][0]
    assert (first.token, first.match) == (3, 1)
    assert first.chance == 2 / 3


def test_rows_see_only_their_own_texts_unless_they_share() -> None:
    for share, expected in ((False, []), (True, [7, 8])):
        lookup = Lookup(share=share)
        lookup.begin(rows([5, 6, 7, 8], [1]))
        lookup.commit(1, [5])
        assert [guess.token for guess in lookup.propose([[], []], [0, 2])[1]] == ([6, 7] if share else [])
        lookup.begin(rows([5, 6]))
        assert draft_tokens(lookup, limit=2) == expected


def test_a_chain_goes_on_where_the_first_stops() -> None:
    lookup = Lookup()
    first = SimpleNamespace(
        reads_hidden=False,
        begin=lambda rows: None,
        commit=lambda row, tokens: None,
        propose=lambda prefixes, limits: [[lookup_guess(2), lookup_guess(3)][: limits[0]]],
    )
    chain = Chain(first, lookup)
    chain.begin(rows([1, 2, 3, 4, 5, 1]))
    assert draft_tokens(chain) == [2, 3, 4, 5, 1]
    assert draft_tokens(chain, limit=1) == [2]


def lookup_guess(token: int) -> Any:
    from graphopt.inference.decoding.proposers import Guess

    return Guess(token, 1.0, "other")
