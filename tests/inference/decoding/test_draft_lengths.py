from __future__ import annotations

import math

from graphopt.inference.decoding.draft_lengths import Lengths
from graphopt.inference.decoding.proposers import Guess
from graphopt.inference.decoding.step_costs import Costs


def costs(*seconds: float) -> Costs:
    return Costs(dict(zip((1, 2, 4, 8, 12), seconds, strict=True)))


def draft(chance: float, length: int = 11) -> list[Guess]:
    return [Guess(0, chance, "test", 4)] * length


CHEAP, DEAR = costs(1, 1.1, 1.2, 1.5, 1.9), costs(1, 2, 4, 8, 12)


def test_length_follows_costs_and_chances() -> None:
    lengths = Lengths()
    assert lengths.to_check([draft(0.95)], [1], CHEAP) == 11
    # 1 + 0.5 + 0.25 + 0.125 = 1.875 tokens for 1.2; more cost 1.5 for 2.0 at most
    assert lengths.to_check([draft(0.5)], [1], CHEAP) == 3
    assert lengths.to_check([draft(0.05)], [1], CHEAP) == 0
    assert lengths.to_check([draft(0.95)], [1], DEAR) == 0
    # a row without a draft is paid for all the same: 2 + 0.5 tokens for 1.5 against 2 for 1
    step_costs = costs(1, 1.5, 2, 4, 6)
    assert lengths.to_check([draft(0.9, 1)], [1], step_costs) == 1
    assert lengths.to_check([draft(0.9, 1), []], [1, 1], step_costs) == 0
    assert lengths.to_check([draft(0.9, 1), []], [1, 0], step_costs) == 1


def test_what_was_right_counts_more_than_what_the_proposer_thinks() -> None:
    lengths = Lengths()
    for _ in range(50):
        lengths.chances.learn(draft(0.95), 0, True)
    assert lengths.to_check([draft(0.95)], [1], CHEAP) == 0
    for _ in range(400):
        lengths.chances.learn(draft(0.1), 11, False)
    assert lengths.to_check([draft(0.1)], [1], CHEAP) == 11


def test_drafts_stop_when_they_have_cost_too_much_and_come_back() -> None:
    lengths = Lengths()
    assert lengths.to_ask(DEAR, 1) == 11
    steps = 0
    while lengths.to_ask(DEAR, 1):
        lengths.record_step(4.0, 1.0, DEAR)  # a step that took as long as 4 and gave 1
        steps += 1
    assert steps <= 5  # the account allows the cost of the widest step
    for _ in range(1000):
        lengths.record_step(0.0, 0.0, DEAR)
    assert lengths.to_ask(DEAR, 1) == 11
    # never more than a share of all steps, and the first few
    assert lengths.loss <= 12 + 4 + 0.01 * 1000


def test_gains_of_the_past_pay_for_few_losses() -> None:
    lengths = Lengths()
    for _ in range(1000):
        lengths.record_step(1.0, 4.0, CHEAP)
    assert lengths.loss == -10


def test_a_guess_is_checked_now_and_then_all_the_same() -> None:
    lengths = Lengths()
    assert [lengths.to_check([draft(0.9)], [1], DEAR) for _ in range(512)].count(1) == 2


def test_a_dear_proposer_is_left_alone_and_tried_again() -> None:
    lengths = Lengths()
    lengths.record_proposal(11 * 0.9, 11)
    limits = [lengths.to_ask(CHEAP, 1) for _ in range(70)]
    assert limits[:60] == [0] * 60
    assert limits[65] == 3


def test_costs_follow_what_is_seen() -> None:
    step_costs = costs(1, 1.5, 2, 4, 6)
    assert [step_costs.seconds_of(columns) for columns in (1, 2, 3, 4, 5, 8, 12)] == [1, 1.5, 2, 2, 4, 4, 6]
    for _ in range(200):
        step_costs.observe(1, 2.0)
    assert math.isclose(step_costs.seconds_of(1), 2.0, rel_tol=0.01)
    assert step_costs.seconds_of(8) > 6  # what makes one width slower makes all slower
    step_costs.observe(4, 1e9)
    assert step_costs.seconds_of(4) < 5  # a single time says little
