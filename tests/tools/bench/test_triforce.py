"""The benchmark of three levels of drafts: what it writes, and that caches hold what it says, on tiny models."""

from __future__ import annotations

import numpy as np
import pytest

from tools.bench.triforce import Expected, Way, best, expected, write

COSTS = {
    "target": {1: 10.0, 12: 10.0},
    "middle": {1: 1.0, 12: 1.0},
    "draft": {1: 0.01, 12: 0.01},
}


@pytest.mark.parametrize(
    "way",
    [Way("single"), Way("draft", draft=3), Way("middle", middle=4), Way("three", draft=2, middle=5)],
    ids=lambda way: way.name,
)
def test_caches_hold_the_text_without_its_newest_token(way: Way) -> None:
    levels = {name: Expected(costs, 100) for name, costs in COSTS.items()}
    done = write(way, levels, 100, 50, (0.7, 0.9), seed=0)
    assert done >= 50
    assert levels["target"].length == 100 + done
    assert all(level.length <= 100 + done for level in levels.values())


def test_right_guesses_save_what_steps_cost() -> None:
    # a step of the target writes its 5 guesses and one more; five steps of the middle cost 5
    assert expected(Way("middle", middle=5), COSTS, (0.0, 1.0)) == pytest.approx((10 + 5) / 6, rel=1e-2)
    # one of 3 guesses of a draft that is never right: a token a step
    assert expected(Way("draft", draft=3), COSTS, (0.0, 0.0)) == pytest.approx(10 + 0.03)
    # every guess of the draft is right: a step of the middle gives 3 tokens, one of the target those and one
    assert expected(Way("three", draft=2, middle=3), COSTS, (1.0, 1.0)) == pytest.approx((10 + 1 + 0.02) / 4, rel=1e-2)


def test_the_fastest_lengths_are_found() -> None:
    found = {way.name: (way, seconds) for way, seconds in best(COSTS, (1.0, 1.0), 6)}
    assert found["middle"][0].middle == 5
    assert found["three levels"][1] < found["middle"][1] < found["single tokens"][1]
    assert found["single tokens"][1] == pytest.approx(10)
    assert np.isclose(found["draft"][1], (10 + 0.05) / 6, rtol=1e-2)
