"""What trees would gain: of choices whose right answers can be worked out by hand, and the tool as it is called."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from tests.native import needs_library
from tools.bench.parts.trees import Costs, best, best_tree, chain, chances_of, ranks_of, tokens_a_step
from tools.studies import tree_gain

# Of four places, the first choice comes at two, and at one of them the second choice behind it.
RANKS = np.array([[1, 2], [1, 9], [2, 1], [9, 1]])


def test_ranks_of_tokens() -> None:
    logits = np.array([[0.0, 3.0, 1.0, 2.0], [5.0, 4.0, 3.0, 2.0]])
    assert ranks_of(logits, [2, 0]).tolist() == [3, 1]


def test_the_best_tree_has_the_likeliest_paths() -> None:
    chances = chances_of(RANKS)
    assert chances == {(1,): 0.5, (1, 2): 0.25, (2,): 0.25, (2, 1): 0.25}
    assert best_tree(chances, 2, 2) == [(1,), (2,)]
    assert best_tree(chances, 9, 1) == [(1,), (2,)]
    assert best_tree(chances, 4, 2) == [(1,), (2,), (1, 2), (2, 1)]


def test_tokens_of_a_step() -> None:
    assert tokens_a_step(RANKS, chain(2)) == 1.5
    assert tokens_a_step(RANKS, [(1,), (2,)]) == 1.75
    assert tokens_a_step(RANKS, [(1,), (2,), (1, 2), (2, 1)]) == 2.25


def test_a_level_of_a_tree_is_a_step_of_the_draft_model() -> None:
    costs = Costs(1.0, {1: 10.0, 2: 20.0, 4: 30.0, 8: 40.0}, {1: 1.0, 2: 1.5, 4: 2.5})
    assert costs.step_seconds(chain(3)) == 30.0 + 3.0
    # the first level comes of the anchor, the second of three nodes, the third of one
    assert costs.step_seconds([(1,), (2,), (3,), (1, 1), (1, 1, 1)]) == 40.0 + 1.0 + 2.5 + 1.0
    assert Costs(1.0, costs.steps, 0.5).step_seconds(chain(3)) == 30.5


def test_the_fastest_one_is_found() -> None:
    ranks = np.repeat(RANKS, 2, axis=0)  # so that both halves are alike
    steps = {1: 1.0, 2: 1.0, 4: 1.5}
    free, dear = Costs(1.0, steps, 0.0), Costs(1.0, steps, 1.0)
    # one guess: 1.5 tokens for 1; two of a chain: 1.5 for 1.5
    chain_plan = best(ranks, free, trees=False)
    assert (chain_plan.tree, chain_plan.ratio) == ([(1,)], 1.5)
    assert best(ranks, free, trees=False, width=4).tree == chain(2)
    # three nodes: 2 tokens for 1.5
    tree_plan = best(ranks, free, trees=True, width=4)
    assert (len(tree_plan.tree), tree_plan.tokens, tree_plan.ratio) == (3, 2.0, pytest.approx(4 / 3))
    assert best(ranks, free, trees=True).ratio == 1.5
    assert best(ranks, dear, trees=True).ratio == pytest.approx(0.8)


@needs_library
def test_the_tool_tells_of_a_draft_model(shipped_artifact: Path, tmp_path: Path) -> None:
    """The model itself as the draft model: its first choice always comes where it is greedy."""
    app = typer.Typer()
    app.command()(tree_gain.main)
    small = ["--modules", "1", "--window", "40", "--tokens", "16", "--threads", "1", "--depth", "3"]
    options = ["--draft", str(shipped_artifact), "--json", str(tmp_path / "rows")]
    result = CliRunner().invoke(app, [str(shipped_artifact), *options, *small])
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "rows").read_text())["rows"]
    assert [row["width"] for row in rows] == 2 * [2, 4, 8, 12, None]
    for row in rows[:5]:
        assert [shares[0] for shares in row["choices"]] == [1.0] * 3
    for row in rows[:4]:
        assert row["chain"]["tokens"] == 1 + row["chain"]["guesses"] == 1 + min(3, (row["width"] or 2) - 1)
        # a second choice never comes, so the best tree is the chain
        assert row["tree"]["nodes"] == [[1] * depth for depth in range(1, 1 + row["chain"]["guesses"])]
