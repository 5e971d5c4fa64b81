"""Measure the gain of trees of guesses over chains, from choices of heads and of a draft model, and from step times.

    python tools/studies/tree_gain.py made --draft draft --modules 6
    python tools/studies/tree_gain.py made --draft draft --steps-of larger

The model completes held-out modules, greedily and by temperature. Then each drafter guesses at each position of these
texts: whether its first, second or third choice is right, at each depth. From these ranks and the measured times of
steps of 1, 2, 4, 8 and 12 tokens and of the drafter follow the best chain and the best tree
(tools/bench/parts/trees.py), each chosen by every second position of the texts and judged by the others. With
``--steps-of``, step times of a larger model, and drafts for free: the most that it could gain by as good a drafter.
Nothing here drafts trees: their step is assumed to cost as much as a chain of as many tokens, a lower bound.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

import graphopt
from graphopt.analysis.structure.ports import HIDDEN
from graphopt.inference.decoding.decoder import Decoder
from graphopt.inference.decoding.proposers import Heads
from graphopt.inference.decoding.sampling import GREEDY, Sampling
from graphopt.inference.decoding.step_costs import WIDTHS
from graphopt.inference.session import Session
from tools.bench.parts.drafting import step_medians, tasks, write_text
from tools.bench.parts.trees import Best, Costs, Ranks, best, ranks_of


def of_heads(session: Session, heads: Heads, prompt: Sequence[int], text: Sequence[int]) -> Ranks:
    """Return the ranks of a text's tokens among the heads' choices, [positions, heads]."""
    ids = np.array([[*prompt, *text]])
    feeds = session.interface.feeds(ids, np.ones_like(ids), session.interface.empty_past(1, ids.shape[1]))
    hidden = session.inference.run([HIDDEN], feeds)[0][0]
    # the state of the prompt's last token predicts the first token of the text, and head 1 the second
    positions = range(len(prompt) - 1, ids.shape[1] - 1 - heads.count)
    logits = heads.logits(hidden[list(positions)], [int(ids[0, position + 1]) for position in positions])
    return np.stack(
        [
            ranks_of(logits[:, head], [int(ids[0, position + 2 + head]) for position in positions])
            for head in range(heads.count)
        ],
        axis=1,
    )


def of_model(smaller: Session, depth: int, prompt: Sequence[int], text: Sequence[int]) -> Ranks:
    """Return the ranks of a text's tokens among a draft model's choices, [positions, depth]."""
    ids = np.array([[*prompt, *text]])
    ranks = ranks_of(smaller.logits(ids)[0, :-1], ids[0, 1:].tolist())
    # the draft begins after the anchor, the first token of the text
    return np.lib.stride_tricks.sliding_window_view(ranks[len(prompt) :], depth)


def in_turns(
    session: Session, draft: Callable[[int], object], context: int, rounds: int = 25
) -> list[dict[int, float]]:
    """Return the median seconds of the model's steps by their tokens, and of the drafter's, as they take turns.

    Each evicts the other's weights from the processor's inner caches, as it does while a text is written.

    Args:
        session: the model.
        draft: runs a draft step of a number of tokens.
        context: tokens before the steps.
        rounds: of all widths.
    """
    ids = np.random.default_rng(0).integers(0, session.interface.vocabulary or 2, (1, context + max(WIDTHS)))
    decoder = Decoder(session, 1, room=ids.shape[1])
    for _ in decoder.feed(ids[:, :context]):
        pass
    samples: list[dict[int, list[float]]] = [{width: [] for width in WIDTHS} for _ in "ab"]
    for _ in range(rounds):
        for width in WIDTHS:
            decoder.rewind(context)
            times = [time.perf_counter()]
            draft(width)
            times.append(time.perf_counter())
            decoder.step(ids[:, context : context + width])
            times.append(time.perf_counter())
            samples[0][width].append(times[2] - times[1])
            samples[1][width].append(times[1] - times[0])
    return [{width: statistics.median(values) for width, values in seconds.items()} for seconds in samples]


def costs_of_model(session: Session, smaller: Session, single_step: float, context: int) -> Costs:
    """Return the costs of a draft model's trees."""
    ids = np.random.default_rng(1).integers(0, smaller.interface.vocabulary or 2, (1, context + max(WIDTHS)))
    decoder = Decoder(smaller, 1, room=ids.shape[1])
    for _ in decoder.feed(ids[:, :context]):
        pass

    def draft(width: int) -> None:
        decoder.rewind(context)
        decoder.step(ids[:, context : context + width])

    steps, drafts = in_turns(session, draft, context)
    return Costs(single_step, steps, drafts)


def costs_of_heads(session: Session, heads: Heads, single_step: float, context: int) -> Costs:
    """Return the costs of trees of heads."""
    width = session.interface.outputs[HIDDEN].shape[-1] or 1
    state = np.random.default_rng(0).standard_normal((1, width)).astype(np.float32)
    steps, drafts = in_turns(session, lambda _: heads.logits(state, [0])[0].argmax(-1), context)
    return Costs(single_step, steps, statistics.median(drafts.values()))


def row_of(name: str, sampling: str, width: int | None, best_chain: Best, best_tree: Best) -> dict[str, Any]:
    """Return a row of the report."""
    return {
        "drafter": name,
        "sampling": sampling,
        "width": width,
        "chain": {"tokens": best_chain.tokens, "ratio": best_chain.ratio, "guesses": len(best_chain.tree)},
        "tree": {
            "tokens": best_tree.tokens,
            "ratio": best_tree.ratio,
            "nodes": [list(path) for path in best_tree.tree],
        },
    }


def main(
    folder: Annotated[Path, typer.Argument(help="an artifact with a tokenizer")],
    draft: Annotated[list[Path] | None, typer.Option(help="a smaller model; several give several rows")] = None,
    steps_of: Annotated[
        Path | None, typer.Option(help="a larger model: take the costs of its steps, and drafts for free")
    ] = None,
    depth: Annotated[int, typer.Option(help="guesses of a draft model, at most")] = 7,
    temperature: float = 0.8,
    modules: int = 6,
    window: Annotated[int, typer.Option(help="tokens of a file")] = 350,
    tokens: Annotated[int, typer.Option(help="tokens of each text")] = 200,
    threads: Annotated[int, typer.Option(help="0 lets the engine choose")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the rows here too")] = None,
) -> None:
    """Print how often choices are right, and the best chain and tree, for each width and for the best one."""
    session = graphopt.load(folder, threads=threads)
    context = window + tokens // 2
    (single_step,) = step_medians(session, (1,), context)
    smaller = {str(path): graphopt.load(path, threads=threads) for path in draft or ()}
    heads = Heads(session) if session.interface.gives_hidden else None
    console, rows, choices = Console(), [], Table("drafter", "sampling", "depth", "1st", "2nd", "3rd")
    table = Table("drafter", "sampling", "step", "chain", "tokens", "speed", "tree", "tokens", "speed", "gain")
    larger = None
    if steps_of is not None:
        times = step_medians(graphopt.load(steps_of, threads=threads), WIDTHS, context)
        larger = Costs(times[0], dict(zip(WIDTHS, times, strict=True)), 0.0)
    costs = {name: larger or costs_of_model(session, model, single_step, context) for name, model in smaller.items()}
    if heads is not None:
        costs["heads"] = larger or costs_of_heads(session, heads, single_step, context)
    completing = [task for task in tasks(session, window, modules) if task.kind == "completing"]
    for sampling in (GREEDY, Sampling(temperature, top_p=0.95, seed=1)):
        sampling_name = "greedy" if sampling == GREEDY else f"temperature {temperature}"
        texts = [(task.prompt, write_text(session, task, tokens, sampling)[0]) for task in completing]
        for name, cost in costs.items():
            if name in smaller:
                parts = [of_model(smaller[name], depth, *text) for text in texts]
            else:
                assert heads is not None
                parts = [of_heads(session, heads, *text) for text in texts]
            ranks = np.concatenate(parts)
            for level, shares in enumerate(_choices(ranks), start=1):
                choices.add_row(name, sampling_name, str(level), *(f"{share:.2f}" for share in shares))
            for width in (*WIDTHS[1:], None):
                pair = [best(ranks, cost, trees=trees, width=width) for trees in (False, True)]
                rows.append({**row_of(name, sampling_name, width, *pair), "choices": _choices(ranks)})
                cells = [cell for candidate in pair for cell in _cells(candidate)]
                step = "best" if width is None else str(width)
                table.add_row(name, sampling_name, step, *cells, f"{pair[1].ratio / pair[0].ratio:.3f}")
    console.print(choices)
    console.print(table)
    cost_table = {name: dataclasses.asdict(cost) for name, cost in costs.items()}
    console.print(json.dumps(cost_table))
    if json_file is not None:
        json_file.write_text(json.dumps({"costs": cost_table, "rows": rows}, indent=2) + "\n", encoding="utf-8")


def _choices(ranks: Ranks) -> list[list[float]]:
    """Return for each depth how often the 1st, 2nd, 3rd choice is right after first choices that are all right."""
    shares = []
    for depth in range(ranks.shape[1]):
        ranks_there = ranks[(ranks[:, :depth] == 1).all(axis=1)][:, depth]
        shares.append([float((ranks_there == choice).mean()) if len(ranks_there) else 0.0 for choice in (1, 2, 3)])
    return shares


def _cells(candidate: Best) -> tuple[str, str, str]:
    levels = [
        sum(len(path) == level for path in candidate.tree) for level in range(1, 1 + max(map(len, candidate.tree)))
    ]
    return "-".join(map(str, levels)), f"{candidate.tokens:.2f}", f"{candidate.ratio:.2f}"


if __name__ == "__main__":
    typer.run(main)
