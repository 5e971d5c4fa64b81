"""Export a small random-weight model of each vision-language family, run it, quantize it, and print a table.

python tools/studies/vision_language.py
python tools/studies/vision_language.py --only gemma3,mistral3

Each is exported, writes greedy texts beside transformers' own, with one image and with two, and is compiled by a preset
and verified.
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

import graphopt
from graphopt.artifact.genai import GENAI_CONFIG
from graphopt.compile.replay import verify
from graphopt.errors import GraphoptError
from graphopt.inference.decoding.continuation import Settings
from graphopt.inference.images import complete, load_vision_language

# Run as a script, Python looks for modules in tools/ only.
sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.signals import write_image
from tests.vision_language import COUNT, NAMES, greedy, prompts_of, transformers_text, write_vision_language_checkpoint

_SIZES = ((60, 40), (33, 52))


@dataclass
class Row:
    """The results of a family.

    Attributes:
        family: its name.
        change: largest difference of the export's logits from transformers' on random images, relative to the largest.
        text: the same for greedy texts about images, and whether all tokens are the same.
        kl: divergence of the compiled model from the exported one on text, in nats.
        verified: the outcome of `graphopt verify` for the compiled model.
        tower: bytes of the compiled vision graph, and the largest difference of its features from those of the exported
            one, relative to the largest.
        genai: whether there is a configuration of onnxruntime-genai.
        seconds: of processor time that the export took.
    """

    family: str
    change: str = ""
    text: str = ""
    kl: str = ""
    verified: str = ""
    tower: str = ""
    genai: str = ""
    seconds: str = ""


def main(
    only: Annotated[str, typer.Option(help="families, with commas")] = "",
    recipe: Annotated[str, typer.Option(help="the preset or the YAML file to compile with")] = "int4",
) -> None:
    """Print a row for each family as it is ready, and the table."""
    rows = []
    for family in only.split(",") if only else NAMES:
        row = Row(family)
        rows.append(row)
        try:
            with tempfile.TemporaryDirectory() as folder:
                _try(row, Path(folder), recipe)
        except GraphoptError as error:
            row.verified = f"{row.verified} {error}".strip()
        print(row, flush=True)
    table = Table(*asdict(rows[0]))
    for row in rows:
        table.add_row(*asdict(row).values())
    Console(width=200).print(table)


def _try(row: Row, folder: Path, recipe: str) -> None:
    import transformers

    source, float_folder, compiled_folder = (folder / name for name in ("source", "exported", "compiled"))
    source.mkdir()
    write_vision_language_checkpoint(row.family, source)
    start = time.process_time()
    manifest = graphopt.export(source, float_folder)
    row.seconds = f"{time.process_time() - start:.0f}"
    row.change = f"{manifest.checks[0].figures['largest_change']:.1e}"
    row.genai = "yes" if (float_folder / GENAI_CONFIG).is_file() else "no"
    pictures = [write_image(folder / f"{n}.png", n, size) for n, size in enumerate(_SIZES)]
    model = transformers.AutoModelForImageTextToText.from_pretrained(source).eval()
    session = load_vision_language(float_folder)
    largest, is_same = 0.0, True
    prompts = prompts_of(row.family, session, pictures)
    for prompt, numbers in prompts:
        tokens, logits = greedy(session, prompt)
        expected_tokens, reference_logits = transformers_text(model, numbers)
        largest = max(largest, float(np.abs(logits - reference_logits).max() / np.abs(reference_logits).max()))
        is_same &= tokens == expected_tokens
    row.text = f"{largest:.1e}, {'same' if is_same else 'other'} tokens"
    result = graphopt.optimize(float_folder, recipe, compiled_folder)
    row.kl = f"{result.manifest.check('quality').figures['kl_mean']:.3f}"
    complete(load_vision_language(compiled_folder), [prompt for prompt, _ in prompts], Settings(COUNT))
    checks = verify(float_folder, compiled_folder).checks
    row.verified = ", ".join(sorted({check.status for check in checks}))
    tower = next(
        (check for check in checks if check.after == "vision: the recipe" and check.status == "measured"), None
    )
    size = sum(file.stat().st_size for file in (compiled_folder / "vision").glob("model.onnx*"))
    change = "" if tower is None else f", moved by {tower.figures['largest_change']:.3f}"
    row.tower = f"{size / 1e6:.2f} MB{change}"


if __name__ == "__main__":
    typer.run(main)
