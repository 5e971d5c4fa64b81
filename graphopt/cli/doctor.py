"""The command ``doctor``: what makes a file slow, large or wrong in onnxruntime, and the passes that mend it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graphopt.cli.commands import command
from graphopt.cli.console import Inputs, Json, NoRun, Overwrite, out, print_json, progress
from graphopt.errors import InputError

if TYPE_CHECKING:
    from graphopt.compile.doctor import Diagnosis, Mending


@command("doctor")
def doctor(
    model: Annotated[Path, typer.Argument(help="an artifact, or an .onnx file, of any maker")],
    fix: Annotated[Path | None, typer.Option("--fix", help="write the mended model to this folder")] = None,
    inputs: Inputs = None,
    overwrite: Overwrite = False,
    no_run: NoRun = False,
    as_json: Json = False,
) -> None:
    """Find what makes a file slow, large or wrong in onnxruntime, and the pass that mends it; with --fix, mend it.

    What is found has a code, whose section in docs/doctor.md says more. Exits with 1 where there is a fault. A mended
    model is proved or measured, pass by pass; a pass that moves what the file computes stops it.
    """
    from graphopt.compile.doctor import diagnose, mend
    from graphopt.report.sentences import sentence

    if fix is not None and no_run:
        raise InputError("--fix measures what it does", remedy="leave out --no-run")
    with progress() as say:
        if fix is None:
            diagnosis = diagnose(model, inputs=inputs, run=not no_run, on_stage=say)
            mending = None
        else:
            mending = mend(model, fix, inputs=inputs, overwrite=overwrite, on_stage=say)
            diagnosis = mending.before
    if as_json:
        print_json(diagnosis if mending is None else mending)
    else:
        _print_symptoms(diagnosis)
        if mending is not None and fix is not None:
            _print_mending(mending, fix)
        for note in diagnosis.notes:
            out.print(f"note: {sentence(note)}", markup=False, highlight=False, soft_wrap=True)
    if mending is None and diagnosis.faults:
        raise typer.Exit(1)


def _print_symptoms(diagnosis: Diagnosis) -> None:
    from graphopt.report.console_table import ConsoleTable
    from graphopt.report.sentences import sentence
    from graphopt.report.tables import size_text

    if not diagnosis.symptoms:
        return out.print(f"{diagnosis.model}: {size_text(diagnosis.bytes)}, nothing is wrong", soft_wrap=True)
    table = ConsoleTable(["", "code", "what", "saves", "what mends it"])
    for symptom in diagnosis.symptoms:
        reduction = "" if symptom.bytes_saved is None else size_text(symptom.bytes_saved)
        table.add_row(symptom.level, symptom.code, sentence(symptom.fact), reduction, symptom.remedy)
    out.print(table)
    if diagnosis.steps:
        out.print(f"--fix FOLDER applies {', '.join(diagnosis.steps)}", markup=False, highlight=False, soft_wrap=True)
    return None


def _print_mending(mending: Mending, folder: Path) -> None:
    from graphopt.report.tables import checks_table, size_text

    out.print(checks_table(mending.checks))
    before, after = mending.before.bytes, mending.after.bytes
    line = f"{size_text(before)} became {size_text(after)}"
    if mending.before.bytes_saved:
        line += f", {size_text(mending.before.bytes_saved)} less were expected"
    if mending.seconds_before is not None and mending.seconds_after is not None:
        line += f"; one run took {mending.seconds_before * 1e3:.2f} ms and takes {mending.seconds_after * 1e3:.2f} ms"
    out.print(line, markup=False, highlight=False, soft_wrap=True)
    if "largest_change" in mending.figures:
        out.print(f"outputs moved by {mending.figures['largest_change']:.1e} of their largest", highlight=False)
    codes = {symptom.code for symptom in mending.after.faults}
    for symptom in mending.before.faults:
        if symptom.steps and symptom.code in codes:
            out.print(f"{symptom.code} is there still", markup=False, highlight=False, soft_wrap=True)
    out.print(f"written: {folder}", markup=False, highlight=False, soft_wrap=True)
