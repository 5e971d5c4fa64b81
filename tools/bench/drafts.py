"""Measure drafts: how often they are right by place, and how fast texts are with them, against single tokens.

    python tools/bench/drafts.py made --drafter lookup --drafter auto --drafter self:layers=3 --rounds 5
    python tools/bench/drafts.py large --drafter known:0.7 --draft-tokens 3 --draft-tokens 7 --kind completing

The second one has a drafter that knows the text and errs by chance, beside the speed that costs and acceptance predict.
Completing and editing are apart (tools/bench/parts/drafting.py says what they are); cases that lose are in the table
like all others. Runs with and without drafts take turns; the ratio is the median over rounds. The texts of both must be
the same wherever the model's steps are, or the run ends with an error.
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
from tools.bench.parts.drafting import Known, Task, step_medians, tasks, tokens_of, written

KNOWN = "known:"
"""What begins the name of a drafter that knows the text and is right with the chance that follows."""


def predicted(session: Session, chance: float, length: int) -> float:
    """Return the speed against single tokens as the medians of steps say it: E c(1) / c(1 + length)."""
    alone, together = step_medians(session, (1, 1 + length))
    return tokens_of(chance, length) * alone / together


def measured(
    session: Session, of: list[Task], name: str, length: str, tokens: int, rounds: int, sampling: Sampling
) -> dict[str, Any]:
    """Return what a drafter does on tasks of one kind."""
    exact = not costs_of(session, 1).different
    known = name.startswith(KNOWN)
    speculation = Speculation(Lookup()) if known else open_speculation(session, name, length)
    ratios, speeds = [], []
    for number in range(rounds):
        seconds = {False: 0.0, True: 0.0}
        count = 0
        for task in of:
            texts = {}
            if known:
                chance = float(name.removeprefix(KNOWN))
                plain, _ = written(session, task, tokens, sampling)
                wrong = next(token for token in range(len(plain) + 1) if token not in plain)
                speculation.proposer, speculation.tokens = Known(plain, chance, wrong), int(length)
            for drafted in (False, True) if number % 2 else (True, False):
                chosen = speculation if drafted else None
                texts[drafted], took = written(session, task, tokens, sampling, chosen)
                seconds[drafted] += took
            if exact and texts[True] != texts[False]:
                raise SystemExit(f"{name} changed the text of {task.name}: {texts[False]} became {texts[True]}")
            count += len(texts[False]) - 1
        ratios.append(seconds[False] / seconds[True])
        speeds.append(count / seconds[False])
    report = speculation.stats.report()
    return {
        "task": of[0].kind,
        "sampling": "greedy" if sampling == GREEDY else f"temperature {sampling.temperature}",
        "drafter": name,
        "draft_tokens": length,
        "plain_tokens_per_second": statistics.median(speeds),
        "ratio": statistics.median(ratios),
        "predicted": predicted(session, float(name.removeprefix(KNOWN)), int(length)) if known else None,
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
    every = tasks(session, window, modules)
    samplings = [GREEDY, *([Sampling(temperature, top_p=0.95, seed=1)] if temperature else [])]
    table = Table("task", "sampling", "drafter", "tokens", "a pass", "right by place", "ratio", "range", "predicted")
    rows = []
    for wanted in kind or ["completing", "editing", "own editing"]:
        of = [task for task in every if task.kind == wanted]
        for sampling in samplings if wanted != "editing" else samplings[:1]:
            for name in drafter or ["lookup", "auto"]:
                for length in draft_tokens or ["auto"]:
                    row = measured(session, of, name, length, tokens, rounds, sampling)
                    rows.append(row)
                    right = "; ".join(
                        f"{source} {' '.join(f'{share:.2f}' for share in shares)}"
                        for source, shares in row["acceptance"].items()
                    )
                    table.add_row(
                        *(wanted, row["sampling"], name, length, f"{row['tokens_per_pass']:.2f}", right),
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
