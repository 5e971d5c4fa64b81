"""The gain of a tree of guesses, from how often the first, second or third choice of a drafter is right.

A chain guesses one token for each position. A tree also checks second and third choices in the same step: its nodes are
paths of choices, (1, 2) is the second choice after the first. A step yields one token more than its longest right path
has. Of all trees of N nodes the best one has the N likeliest paths (Cai et al., 2024, arXiv:2401.10774, section 2.3.3;
Chen et al., 2024, arXiv:2402.12374): a path is never likelier than its beginning.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ranks = npt.NDArray[np.int64]
"""[positions, depth]: at each depth, which choice of the drafter is right, given the right text before it."""

Path = tuple[int, ...]


def ranks_of(logits: npt.NDArray[np.floating], tokens: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return which choice each token is, 1 for the likeliest, by its logits [number, vocabulary]."""
    token_logits = logits[np.arange(len(tokens)), list(tokens)]
    ranks: npt.NDArray[np.int64] = 1 + (logits > token_logits[:, None]).sum(axis=1)
    return ranks


def chances_of(ranks: Ranks, choices: int = 3) -> dict[Path, float]:
    """Return the share of positions at which each path of the first ``choices`` choices is right."""
    counts: Counter[Path] = Counter()
    for row in ranks.tolist():
        path: Path = ()
        for rank in row:
            if rank > choices:
                break
            path = (*path, rank)
            counts[path] += 1
    return {path: count / len(ranks) for path, count in counts.items()}


def best_tree(chances: Mapping[Path, float], nodes: int, depth: int) -> list[Path]:
    """Return the likeliest paths of at most ``depth`` choices, which make a tree; shorter ones first where alike."""
    paths = sorted((path for path in chances if len(path) <= depth), key=lambda path: (-chances[path], len(path), path))
    return paths[:nodes]


def chain(length: int) -> list[Path]:
    """Return the paths of a chain of first choices."""
    return [(1,) * depth for depth in range(1, length + 1)]


def tokens_a_step(ranks: Ranks, tree: Collection[Path]) -> float:
    """Return how many tokens a step gives on average that checks this tree."""
    nodes = set(tree)
    return 1 + sum(
        sum(tuple(row[:length]) in nodes for length in range(1, len(row) + 1)) for row in ranks.tolist()
    ) / len(ranks)


@dataclass(frozen=True)
class Costs:
    """What a step and a draft cost.

    Attributes:
        single_step: seconds of a step of one token without a drafter.
        steps: seconds of the model's steps by their tokens, in turns with the drafter's.
        drafter: seconds of a draft model's steps by their tokens; those of heads for any draft.
    """

    single_step: float
    steps: Mapping[int, float]
    drafter: Mapping[int, float] | float

    def step_seconds(self, tree: Collection[Path]) -> float:
        """Return the seconds of a step with this tree, and of making it.

        A draft model runs once for each level, with the nodes of the one before it.
        """
        step = at_width(self.steps, 1 + len(tree))
        if isinstance(self.drafter, float):
            return step + self.drafter
        nodes = Counter(map(len, tree))
        return step + sum(at_width(self.drafter, nodes[level - 1] if level > 1 else 1) for level in sorted(nodes))


def at_width(seconds: Mapping[int, float], tokens: int) -> float:
    """Return the seconds of a step of ``tokens``: those of the next measured width."""
    return seconds[min(width for width in seconds if width >= tokens)]


@dataclass(frozen=True)
class Best:
    """The best tree, or chain.

    Attributes:
        tree: its nodes.
        tokens: that a step with it yields, at other positions of the texts than it was chosen by.
        ratio: its speed relative to steps of one token.
    """

    tree: list[Path]
    tokens: float
    ratio: float


def best(ranks: Ranks, costs: Costs, *, trees: bool, width: int | None = None) -> Best:
    """Return the fastest tree, or chain, for measured costs; chosen by every second position, judged by the others.

    Args:
        ranks: which choices are right.
        costs: of steps and drafts.
        trees: whether it may have second and third choices.
        width: tokens of the step, as far as there are choices; any width that was measured by default.
    """
    chosen_by, judged_by = ranks[::2], ranks[1::2]
    chances, deepest = chances_of(chosen_by), ranks.shape[1]
    speeds = []
    for nodes in [step_width - 1 for step_width in costs.steps if step_width > 1] if width is None else [width - 1]:
        candidates = [
            best_tree(chances, nodes, depth) if trees else chain(depth) for depth in range(1, min(deepest, nodes) + 1)
        ]
        if width is not None:  # as many nodes as the step has room for
            candidates = [tree for tree in candidates if len(tree) == max(map(len, candidates))]
        for tree in candidates:
            speeds.append((tokens_a_step(chosen_by, tree) / costs.step_seconds(tree), tree))
    _, tree = max(speeds, key=lambda pair: pair[0])
    tokens = tokens_a_step(judged_by, tree)
    return Best(tree, tokens, tokens * costs.single_step / costs.step_seconds(tree))
