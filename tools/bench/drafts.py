"""Measure drafts: how often each guess of a draft is right, and the speed with drafts relative to single tokens.

    python tools/bench/drafts.py made --drafter lookup --drafter auto --drafter self:layers=3 --rounds 5
    python tools/bench/drafts.py large --drafter known:0.7 --draft-tokens 3 --draft-tokens 7 --kind completing

The second one has a drafter that knows the text and errs at random, beside the speed that costs and acceptance predict.
Completing and editing are separate tasks (see tools/bench/parts/drafting.py); cases that lose are in the table like all
others. Runs with and without drafts take turns; the ratio is the median over rounds. Both must write the same text
where the model's steps of all widths have the same bits, or the run ends with an error.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

import graphopt
from graphopt.inference.decoding.proposers import Lookup
from graphopt.inference.decoding.proposers.registry import open_speculation
from graphopt.inference.decoding.sampling import GREEDY, Sampling
from graphopt.inference.decoding.speculation import Speculation
from graphopt.inference.decoding.step_costs import costs_of
from graphopt.inference.session import Session
from tools.bench.parts.drafting import OracleProposer, Task, step_medians, tasks, tokens_of, write_text

ORACLE = "known:"
"""Prefix of the name of a drafter that knows the text; the probability that a guess is right follows."""


def predict_speedup(session: Session, chance: float, length: int) -> float:
    """Return the speedup over single tokens that medians of steps predict: E c(1) / c(1 + length)."""
    single_step, draft_step = step_medians(session, (1, 1 + length))
    return tokens_of(chance, length) * single_step / draft_step


def measure(
    session: Session, kind_tasks: list[Task], name: str, length: str, tokens: int, rounds: int, sampling: Sampling
) -> dict[str, Any]:
    """Return the row of a drafter on tasks of one kind."""
    exact = not costs_of(session, 1).different
    is_oracle = name.startswith(ORACLE)
    speculation = Speculation(Lookup()) if is_oracle else open_speculation(session, name, length)
    ratios, speeds = [], []
    for number in range(rounds):
        seconds = {False: 0.0, True: 0.0}
        count = 0
        for task in kind_tasks:
            texts = {}
            if is_oracle:
                chance = float(name.removeprefix(ORACLE))
                plain, _ = write_text(session, task, tokens, sampling)
                wrong_token = next(token for token in range(len(plain) + 1) if token not in plain)
                speculation.proposer, speculation.tokens = OracleProposer(plain, chance, wrong_token), int(length)
            for with_drafts in (False, True) if number % 2 else (True, False):
                drafts = speculation if with_drafts else None
                texts[with_drafts], text_seconds = write_text(session, task, tokens, sampling, drafts)
                seconds[with_drafts] += text_seconds
            if exact and texts[True] != texts[False]:
                raise SystemExit(f"{name} changed the text of {task.name}: {texts[False]} became {texts[True]}")
            count += len(texts[False]) - 1
        ratios.append(seconds[False] / seconds[True])
        speeds.append(count / seconds[False])
    report = speculation.stats.report()
    return {
        "task": kind_tasks[0].kind,
        "sampling": "greedy" if sampling == GREEDY else f"temperature {sampling.temperature}",
        "drafter": name,
        "draft_tokens": length,
        "plain_tokens_per_second": statistics.median(speeds),
        "ratio": statistics.median(ratios),
        "predicted": predict_speedup(session, float(name.removeprefix(ORACLE)), int(length)) if is_oracle else None,
        "lowest": min(ratios),
        "highest": max(ratios),
        **{key: report[key] for key in ("tokens_per_pass", "widths", "acceptance", "notes")},
    }


def main(
    folder: Annotated[Path, typer.Argument(help="an artifact with a tokenizer")],
    drafter: Annotated[list[str] | None, typer.Option(help="as --speculate of graphopt run, or known:P")] = None,
    draft_tokens: Annotated[
        list[str] | None, typer.Option(help="as of graphopt run; several give several rows")
    ] = None,
    kind: Annotated[list[str] | None, typer.Option(help="completing, editing, own editing; all by default")] = None,
    temperature: Annotated[float, typer.Option(help="above 0: rows that draw, besides greedy ones")] = 0.8,
    modules: int = 6,
    window: Annotated[int, typer.Option(help="tokens of a file")] = 350,
    tokens: Annotated[int, typer.Option(help="tokens of each text")] = 200,
    rounds: int = 5,
    threads: Annotated[int, typer.Option(help="0 lets the engine choose")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the rows here too")] = None,
) -> None:
    """Print a row for each task, drafter and length."""
    session = graphopt.load(folder, threads=threads)
    costs = costs_of(session, 1)
    all_tasks = tasks(session, window, modules)
    samplings = [GREEDY, *([Sampling(temperature, top_p=0.95, seed=1)] if temperature else [])]
    table = Table("task", "sampling", "drafter", "tokens", "a pass", "right by place", "ratio", "range", "predicted")
    rows = []
    for task_kind in kind or ["completing", "editing", "own editing"]:
        kind_tasks = [task for task in all_tasks if task.kind == task_kind]
        for sampling in samplings if task_kind != "editing" else samplings[:1]:
            for name in drafter or ["lookup", "auto"]:
                for length in draft_tokens or ["auto"]:
                    row = measure(session, kind_tasks, name, length, tokens, rounds, sampling)
                    rows.append(row)
                    acceptance = "; ".join(
                        f"{source} {' '.join(f'{share:.2f}' for share in shares)}"
                        for source, shares in row["acceptance"].items()
                    )
                    table.add_row(
                        *(task_kind, row["sampling"], name, length, f"{row['tokens_per_pass']:.2f}", acceptance),
                        *(f"{row['ratio']:.3f}", f"{row['lowest']:.2f}-{row['highest']:.2f}"),
                        "" if row["predicted"] is None else f"{row['predicted']:.3f}",
                    )
    console = Console()
    console.print(table)
    steps = ", ".join(f"{width}: {1000 * seconds:.2f} ms" for width, seconds in costs.seconds.items())
    console.print(f"steps by their tokens: {steps}; bits differ at {list(costs.different) or 'none'}")
    if json_file is not None:
        json_file.write_text(json.dumps({"steps": costs.seconds, "rows": rows}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
