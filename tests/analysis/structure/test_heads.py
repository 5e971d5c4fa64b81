from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphopt.analysis.structure.heads import HeadScore, HeadScores, Rank, read_scores
from graphopt.errors import InputError


def scores(*triples: tuple[float, float, float], kv_heads: int = 2) -> HeadScores:
    """Scores (induction, echo, lost), head by head."""
    heads = [HeadScore(induction=induction, echo=echo, lost=lost_mass) for induction, echo, lost_mass in triples]
    layers = {
        number: tuple(heads[first : first + kv_heads]) for number, first in enumerate(range(0, len(heads), kv_heads))
    }
    return HeadScores(origin="a", layers=layers)


def test_echo_heads_come_first_and_induction_heads_fill_up() -> None:
    head_scores = scores((0.1, 0.0, 0.9), (0.9, 0.1, 0.0), (0.2, 0.8, 0.1), (0.8, 0.2, 0.2))
    assert head_scores.retrieval_heads(0.25, "razor") == {(1, 0)}
    assert head_scores.retrieval_heads(0.5, "razor") == {(1, 0), (0, 1)}
    assert head_scores.retrieval_heads(0.75, "razor") == {(1, 0), (0, 1), (1, 1)}
    assert head_scores.retrieval_heads(0.5, "mass") == {(0, 0), (1, 1)}


def test_the_papers_shares_are_1_echo_head_for_14_induction_heads() -> None:
    # 100 heads whose echo scores fall and whose induction scores rise
    triples = [(number / 100, 1 - number / 100, 0.0) for number in range(100)]
    heads = scores(*triples).retrieval_heads(0.15, "razor")
    assert heads == {(0, 0)} | {divmod(number, 2) for number in range(86, 100)}


@given(
    st.lists(st.tuples(*[st.sampled_from([0.0, 0.25, 0.5, 1.0])] * 3), min_size=2, max_size=12).filter(
        lambda triples: len(triples) % 2 == 0
    ),
    st.floats(0, 1),
    st.sampled_from(["razor", "mass"]),
)
def test_a_share_is_a_number_of_heads_and_a_larger_one_of_the_same_rank_has_no_worse_heads(
    triples: list[tuple[float, float, float]], share: float, rank: Rank
) -> None:
    head_scores = scores(*triples)
    heads = head_scores.retrieval_heads(share, rank)
    assert share * len(triples) - 1e-6 <= len(heads) < share * len(triples) + 1
    assert heads <= head_scores.retrieval_heads(1.0, rank) == {(n, h) for n in head_scores.layers for h in range(2)}
    if rank == "mass":
        lost_mass = {
            (number, head): head_scores.layers[number][head].lost for number in head_scores.layers for head in range(2)
        }
        other_masses = [lost_mass[head] for head in lost_mass.keys() - heads]
        assert not other_masses or not heads or min(lost_mass[head] for head in heads) >= max(other_masses)


def test_files_that_are_no_calibration_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot be read: No such file.*graphopt heads"):
        read_scores(tmp_path / "none.json")
    (tmp_path / "other.json").write_text('{"format": 1}')
    with pytest.raises(InputError, match="not a calibration of heads"):
        read_scores(tmp_path / "other.json")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="not a calibration of heads"):
        read_scores(tmp_path / "bytes")
