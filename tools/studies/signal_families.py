"""Recipes on each family of images and recordings of the tests: small models of random weights.

    python tools/studies/signal_families.py                          # all families, five minutes
    python tools/studies/signal_families.py vit,detr --recipes rotate,int8

Each is exported, optimized, verified, and run on two files; `int8` is calibrated on eight random signals, and all are
judged on others. Random weights show whether a graph compiles and how much exact passes change outputs, but not the
loss of a trained model by rounding.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

# Run as a script, Python looks for modules in tools/ only.
sys.path.insert(0, str(Path(__file__).parents[2]))
import graphopt
from graphopt.compile.replay import verify
from graphopt.inference.signals import load_signals
from graphopt.quality.judge import quality_figures
from graphopt.tasks import TASKS
from graphopt.tasks.ports import port_of_value
from tests.signals import FAMILIES, write_image, write_recording, write_signal_checkpoint

CALIBRATED_RECIPE, SUFFIXES = "int8", {"images": "png", "recordings": "wav"}


def calibration(folder: Path, file: Path) -> Path:
    """Write eight random signals that a model is not judged on."""
    artifact = graphopt.read(folder)
    task: Any = TASKS[artifact.manifest.task]
    ports = [port_of_value(value) for value in artifact.model.graph.inputs]
    feeds = [task.random_feeds(ports, 1, np.random.default_rng(100 + number)) for number in range(8)]
    arrays: dict[str, Any] = {name: np.stack([sample[name] for sample in feeds]) for name in feeds[0]}
    np.savez(file, **arrays)
    return file


def change_of(manifest: Any) -> float:
    """Return the largest change of an output by an exact pass, as a share of its largest number."""
    return max((check.figures.get("largest_change", 0.0) for check in manifest.checks), default=0.0)


def study(family: str, recipes: list[str], folder: Path) -> None:
    """Print a line for each recipe."""
    write_signal_checkpoint(family, folder / "checkpoint")
    export_manifest = graphopt.export(folder / "checkpoint", folder / "float32")
    print(
        f"{family:17} {export_manifest.task:17} torch and graph differ by {change_of(export_manifest):.1e}", flush=True
    )
    for name in recipes:
        inputs = calibration(folder / "float32", folder / "calibration.npz") if name == CALIBRATED_RECIPE else None
        artifact = graphopt.optimize(folder / "float32", name, folder / name, inputs=inputs, force=True)
        checks = verify(folder / "float32", folder / name, inputs=inputs).checks
        session = load_signals(folder / name)
        write = write_image if session.task.reads == "images" else write_recording
        for seed in range(2):
            session.run(session.read_file(write(folder / f"{seed}.{SUFFIXES[session.task.reads]}", seed)))
        if any(report.effect == "lossy" for report in artifact.manifest.passes):
            figures = quality_figures(folder / "float32", folder / name, export_manifest.task)
            outcome = f"cosine {figures['cosine_mean']:.4f}, relative error {figures['relative_error']:.3f}"
        else:
            outcome = f"exact: moved by {change_of(artifact.manifest):.1e}"
        print(f"    {name:10} {outcome}; {', '.join(f'{check.name} {check.status}' for check in checks)}", flush=True)


def main(
    families: Annotated[str, typer.Argument(help="Names with commas between them.")] = ",".join(FAMILIES),
    recipes: str = "rotate,small-rtn,w8a8,int8",
) -> None:
    """Send families through recipes."""
    for family in families.split(","):
        with tempfile.TemporaryDirectory() as folder:
            study(family, recipes.split(","), Path(folder))


if __name__ == "__main__":
    typer.run(main)
