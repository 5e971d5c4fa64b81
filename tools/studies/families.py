"""Rotate a small random-weight model of every family, check it, and print which rotations each family takes.

python tools/studies/families.py --markdown docs/families.md
python tools/studies/families.py --markdown docs/families.md --only qwen3_next,mamba2
python tools/studies/families.py --unrolled 4
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import onnx_ir as ir
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

import graphopt
from graphopt.analysis.bases.axes import Axis, Basis
from graphopt.analysis.bases.search import find_bases
from graphopt.artifact import artifact
from graphopt.errors import GraphoptError
from graphopt.graph.diagnostics import PassReport
from graphopt.models.checkpoint import quiet
from graphopt.models.loading import LoadedModel, weights_of
from graphopt.models.trace import task_of_model, trace
from graphopt.models.unrolling import trace_loaded
from graphopt.models.unrolling.kinds import plan_layers
from graphopt.models.unrolling.refusals import NotUnderstoodError
from graphopt.passes.algebra.fold_norms import FoldNorms
from graphopt.passes.algebra.rotate import Rotate
from graphopt.passes.algebra.rotate.rewrite import BASIS_FUSED
from graphopt.passes.lift.canonicalize import Canonicalize
from graphopt.report.sentences import sentence
from graphopt.verification.certificate.checker import check
from graphopt.verification.equivalence import Verifier

# Run as a script, Python looks for modules in tools/ only.
sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.families import ENCODERS, FAMILIES, RECURRENT, make_model
from tests.isomorphic import description

ALL_ROTATIONS = Rotate(online_residual=True, query_key="hadamard", weight_inputs="hadamard")
COLUMNS = {
    "residual": "residual",
    "value": "value",
    "query_key": "query and key",
    "weight_input": "down projection",
}
_INTRODUCTION = """\
# Which rotations a family takes

For each family a model of two layers with random weights, norm gains and biases was exported with `graphopt export`,
then canonicalized, its norms folded, and rotated with every rotation enabled. "falcon" has one head of keys and
values, "falcon_new" the newer layout with groups.

- **free**: multiplied into the weights, nothing is added at run time.
- **online (n)**: n `Hadamard` nodes run in the two layers together, the rest is multiplied into the weights.
- **refused**: left as it was, with the reason and the node that the pass reports.
- **residual**: the stream between the layers. **value**: what attention passes on, per head. **query and key**: what
  attention compares and caches. **down projection**: every weight input that no other rotation reaches; where
  values are refused, that of attention's output projection too.
- "falcon_new" keeps queries, keys and values of a group on one axis, in slices that the analysis treats as one
  basis: the rotary embedding of queries and keys therefore pins values too.
- **certificate**: what the independent checker of `graphopt.verification.certificate` says about the rotated graph.
- **change of logits**: the largest, relative to the largest logit, from the export to the rotated graph in onnxruntime:
  a prefill with padding, then a second call on its cache.

Recurrent families stand at the end. Their convolutions and gates work on single coordinates, so what a recurrence reads
stays as it is; the residual is free as in any other.

In BERT, an encoder, norms with gains sit on the residual itself, so the residual stays as it is; values, queries and
keys are rotated for free (`tests/passes/algebra/test_rotate_encoder.py`).

This page was made by `python tools/studies/families.py --markdown docs/families.md`.

"""


@dataclass
class Outcome:
    """The bases of one role: how many are rotated, by how many nodes at run time, and why others are not."""

    rotated: int = 0
    nodes: int = 0
    refusals: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        parts = [f"online ({self.nodes})" if self.nodes else "free"] if self.rotated else []
        return "; ".join(parts + [f"refused: {reason}" for reason in self.refusals[:1]]) or "none"


@dataclass
class Row:
    """One family: its outcomes by role, the certificate's status and the largest change of a logit; or what failed."""

    family: str
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    certificate: str = ""
    change: float | None = None
    failure: str = ""

    def cells(self) -> list[str]:
        if self.failure:
            return [self.family, self.failure, *[""] * (len(COLUMNS) + 1)]
        change = "" if self.change is None else f"{self.change:.1e}"
        return [self.family, *(str(self.outcomes[role]) for role in COLUMNS), self.certificate, change]


def outcomes(bases: list[Basis], after: ir.Model, report: PassReport) -> dict[str, Outcome]:
    """Return what ``report`` and the nodes of ``after`` say about each of ``bases``, by role."""
    fused_pairs = {
        (str(change.what.figures["basis"]), str(change.what.figures["role"]))
        for change in report.changes
        if change.what.code == BASIS_FUSED.code
    }
    rotated_values = [node.inputs[0] for node in after.graph if node.op_type == "Hadamard"]
    axes = [
        Axis(value.name or "", len(value.shape) - 1) for value in rotated_values if value and value.shape is not None
    ]
    outcome_by_role = {role: Outcome() for role in COLUMNS}
    for basis in bases:
        # A residual that is rotated only where weights read it is reported under the role of weight inputs.
        role = next((role for name, role in fused_pairs if name == basis.name), basis.role)
        if role not in outcome_by_role:
            continue
        nodes = sum(axis in basis.axes for axis in axes)
        outcome_by_role[role].nodes += nodes
        outcome_by_role[role].rotated += bool(nodes) or (basis.name, role) in fused_pairs
        for skip in report.skips:
            if (skip.where, skip.reason.figures["width"]) == (basis.name, basis.width):
                outcome_by_role[basis.role].refusals.append(f"{sentence(skip.reason)} ({skip.node or ''})")
    return outcome_by_role


def fold(model: ir.Model) -> None:
    """Bring an export into the form that is rotated."""
    Canonicalize()(model)
    FoldNorms()(model)


def examine(family: str, path: Path, rotate: Rotate = ALL_ROTATIONS) -> Row:
    """Rotate the artifact at ``path`` and check each step from the exported graph on.

    Raises:
        GraphoptError: a pass or the comparison of logits failed.
    """
    model = artifact.read(path).model
    with tempfile.TemporaryDirectory() as temporary:
        verifier = Verifier(Path(temporary), {})
        verifier.start(model)
        fold(model)
        before, bases = model.clone(), find_bases(model.graph)
        report = rotate(model).report
        assert report.claims is not None
        certificate = check(before, model, report.claims)
        outcome_by_role = outcomes(bases, model, report)
        change = verifier.check(model, "rotate", "exact").figures["largest_change_from_start"]
    return Row(family, outcome_by_role, certificate.status, change)


def compare_unrolled(layers: int) -> None:
    """Print for every family whether its graph unrolled to ``layers`` equals a trace of all of them."""
    table = Table("family", "traced layers", "the same graph", "seconds", "of a trace of all")
    for family in track([*FAMILIES, *ENCODERS], "families"):
        with quiet():
            model, model_copy = (make_model(family, layers).eval() for _ in range(2))
        start = time.process_time()
        loaded_model = LoadedModel(model, weights_of(model), lambda: None, [])
        try:
            with quiet():
                sample_layers = plan_layers(model_copy, task_of_model(model_copy).sample(model_copy)).samples
            layer_text = ", ".join(map(str, sample_layers))
        except NotUnderstoodError as error:
            layer_text = sentence(error.reason)
        start = time.process_time()
        program, _ = trace_loaded(loaded_model, family)
        middle = time.process_time()
        is_same = description(program) == description(trace(model_copy, family))
        seconds = (middle - start, time.process_time() - middle)
        table.add_row(family, layer_text, "yes" if is_same else "NO", *(f"{value:.0f}" for value in seconds))
    Console().print(table)


def _table_of(markdown: Path) -> dict[str, list[str]]:
    """Return the cells of each family in a table that was written before."""
    lines = [line.split("|")[1:-1] for line in markdown.read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line] for line in lines[2:]]
    return {line[0]: line for line in cells}


def main(
    unrolled_layers: Annotated[
        int | None,
        typer.Option("--unrolled", help="instead, compare graphs unrolled to this number of layers with traces of all"),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the rows here too")] = None,
    markdown: Annotated[Path | None, typer.Option(help="write the table here too, with what it means")] = None,
    only: Annotated[str, typer.Option(help="families, separated by commas; other rows of the table stay")] = "",
) -> None:
    """Make, export, rotate and check every family."""
    if unrolled_layers is not None:
        return compare_unrolled(unrolled_layers)
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        for family in track(only.split(",") if only else [*FAMILIES, *RECURRENT], "families"):
            source, target = Path(temporary) / f"{family}.transformers", Path(temporary) / family
            with quiet():
                make_model(family).save_pretrained(source)
            try:
                graphopt.export(source, target)
                rows.append(examine(family, target))
            except GraphoptError as error:
                rows.append(Row(family, failure=error.message))
    headings = ["family", *COLUMNS.values(), "certificate", "change of logits"]
    table = Table(*headings)
    for row in rows:
        table.add_row(*row.cells())
    Console().print(table)
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    if markdown is not None:
        cells = {row.family: row.cells() for row in rows}
        if only and markdown.is_file():
            cells = {name: line for name, line in _table_of(markdown).items() if name not in cells} | cells
        lines = [headings, ["---"] * len(headings), *cells.values()]
        text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
        markdown.parent.mkdir(parents=True, exist_ok=True)
        markdown.write_text(_INTRODUCTION + text)


if __name__ == "__main__":
    typer.run(main)
