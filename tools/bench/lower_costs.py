"""Write measured costs, by which the pass ``lower`` chooses between onnxruntime's kernel and graphopt's.

    ENGINES='graphopt-int4,graphopt-int8,onnxruntime-matmulnbits-4-g128,onnxruntime-matmulnbits-8-g128'
    python tools/bench/ops.py --transforms '' --engines "$ENGINES" --json avx512.json
    GRAPHOPT_OPS_ISA=avx2 python tools/bench/ops.py --transforms '' --engines "$ENGINES" --json avx2.json
    python tools/bench/lower_costs.py avx512=avx512.json avx2=avx2.json

Without ``--write`` the table is only shown. Costs of an instruction set that is not given stay as they are.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from graphopt.artifact.manifest import installed_versions
from graphopt.runtime_ops import costs
from graphopt.runtime_ops.costs import Cost, Costs

_MATMULNBITS = re.compile(r"onnxruntime-matmulnbits-(\d)-g(\d+)")


def read_costs(instructions: str, report: dict[str, Any]) -> list[Cost]:
    """Return a cost for each case in which both kernels were timed with codes of the same width and the same groups."""
    times = {(tuple(row["case"].items()), row["engine"]): float(row["median_us"]) for row in report["rows"]}
    cost_rows = []
    for (key, engine), peer_us in times.items():
        case, match = dict(key), _MATMULNBITS.fullmatch(engine)
        if match is None or int(match[2]) != case["group"]:
            continue
        graphopt_us = times.get((key, f"graphopt-int{match[1]}"))
        if graphopt_us is not None:
            cost_rows.append(
                Cost(
                    bits=int(match[1]),
                    group=case["group"],
                    instructions=instructions,
                    rows_of_x=case["rows"],
                    shape=(case["inner"], case["outer"]),
                    matmulnbits_us=round(peer_us, 1),
                    matmultable_us=round(graphopt_us, 1),
                )
            )
    return cost_rows


def main(
    reports: Annotated[list[str], typer.Argument(help="INSTRUCTIONS=FILE, as tools/bench/ops.py --json wrote it")],
    write: Annotated[bool, typer.Option("--write", help="let the pass use them")] = False,
) -> None:
    """Show the costs, and write them beside the pass if asked to."""
    rows: list[Cost] = []
    machines = set()
    for argument in reports:
        instructions, _, file = argument.partition("=")
        report = json.loads(Path(file).read_text(encoding="utf-8"))
        machines.add(str(report["machine"]))
        rows += read_costs(instructions, report)
    if not rows:
        raise typer.BadParameter("no case has both kernels")
    given_sets = {row.instructions for row in rows}
    kept_rows = [row for row in costs.shipped_costs().costs if row.instructions not in given_sets]
    if kept_rows:
        machines.add(costs.shipped_costs().machine)
    new_costs = Costs(
        source="tools/bench/ops.py, read by tools/bench/lower_costs.py",
        machine="; ".join(sorted(machines)),
        versions=installed_versions(),
        costs=(*kept_rows, *rows),
    )
    table = Table("instructions", "bits", "rows of x", "shape", "group", "MatMulNBits us", "MatMulTable us", "ratio")
    for row in rows:
        shape, ratio = f"{row.shape[0]} x {row.shape[1]}", f"{row.matmulnbits_us / row.matmultable_us:.2f}"
        figures = (f"{row.matmulnbits_us:g}", f"{row.matmultable_us:g}", ratio)
        table.add_row(row.instructions, str(row.bits), str(row.rows_of_x), shape, str(row.group), *figures)
    Console().print(table)
    if write:
        Path(costs.__file__).with_name(costs.FILE).write_text(
            new_costs.model_dump_json(indent=2) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    typer.run(main)
