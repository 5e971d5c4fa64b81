"""Methods of papers on encoders and images, built of graphopt's parts: a table for each kind of model.

    python tools/studies/graph_methods.py skipping                       # graphs that skip tokens, with times
    python tools/studies/graph_methods.py encoder MINILM                 # a checkpoint of all-MiniLM-L6-v2
    python tools/studies/graph_methods.py convolutions FILE.onnx CALIBRATION.npz JUDGED.npz

`skipping` times exported graphs in onnxruntime, `convolutions` runs int8 graphs there. `encoder` computes in torch with
floats: weights and inputs have the values of their codes, so errors are those of a graph with such codes, without
times. Methods of diffusion papers are in `tools/studies/timesteps.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

# Run as a script, Python looks for modules in tools/ only.
sys.path.insert(0, str(Path(__file__).parents[2]))
from tools.bench.parts.machine import OtherLoad, describe

app = typer.Typer(help=__doc__, add_completion=False)


@app.command()
def skipping(
    recipes: Annotated[str, typer.Option(help="presets, with commas between")] = "w8a8",
    rounds: Annotated[int, typer.Option(help="of times")] = 21,
) -> None:
    """Time graphs that skip tokens beside the same layers that do not."""
    from tools.studies.graphs.skipping import rows

    load = OtherLoad()
    print("| graph | tokens out | ms a run | times as fast as all tokens | relative change from torch |")
    print("| --- | --- | --- | --- | --- |")
    for row in rows(tuple(recipes.split(",")), rounds):
        print(row, flush=True)
    print(f"{describe()}; others took {load.share():.0%} of the cores")


@app.command()
def encoder(checkpoint: Annotated[Path, typer.Argument(help="a folder of all-MiniLM-L6-v2")]) -> None:
    """Round and prune an encoder as papers do."""
    from tools.studies.graphs.encoder import rows

    print("| paper | variant | error of hidden states |")
    print("| --- | --- | --- |")
    for row in rows(checkpoint):
        print(row, flush=True)


@app.command()
def convolutions(
    file: Annotated[Path, typer.Argument(help="an .onnx file of convolutions")],
    calibration: Annotated[Path, typer.Argument(help="an .npz file of samples that ranges are measured on")],
    test_file: Annotated[Path, typer.Argument(metavar="JUDGED", help="another one that outputs are compared on")],
) -> None:
    """Round scales of an int8 graph to numbers that integer arithmetic can apply."""
    from tools.studies.graphs.convolutions import rows

    print("| scales | cosine with float | relative error | relative change from int8 |")
    print("| --- | --- | --- | --- |")
    for row in rows(file, calibration, test_file):
        print(row, flush=True)


@app.callback()
def main() -> None:
    """Choose a kind of model."""


if __name__ == "__main__":
    app()
