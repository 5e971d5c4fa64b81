"""The main workflow on the shipped model: export, rotate, quantize, check, evaluate, complete."""

from __future__ import annotations

import lzma
import time
from typing import TYPE_CHECKING

from pydantic import BaseModel

from graphopt.compile.pipeline import optimize
from graphopt.graph.diagnostics import Fact
from graphopt.inference.decoding.sampling import Sampling
from graphopt.inference.generation import generate
from graphopt.inference.session import load
from graphopt.models.export import export
from graphopt.quality.evaluation import evaluate
from graphopt.report.page.write import PageOptions, write
from graphopt.util.progress import Progress, silent
from graphopt.util.stdlib_text import held_out_text

if TYPE_CHECKING:
    from pathlib import Path

    from graphopt.artifact.manifest import Manifest

MODEL = "stdlib_lm"
# Six of the held-out modules, 29% of the text: `graphopt eval --held-out` reads them all.
MODULES = ("csv", "heapq", "json/decoder", "shlex", "string", "textwrap")
EXPORT = "float32"
RECIPES = ("rotate", "int4", "rotate-int4")
PROMPT = "def read_lines(path):"
SAMPLING = Sampling(temperature=0.5, top_p=0.9, seed=2)


class Stage(BaseModel):
    """One row of the demo's table.

    Attributes:
        name: the recipe, or the export.
        folder: the artifact that was written.
        bytes: size of all its files, without heads that draft.
        bits_per_weight: bits of one weight, scales included.
        bits_per_byte: the model's loss per byte of the held-out text.
        largest_logit_change: against the exported model, relative to the largest logit.
        activations: to what quantized products round their inputs.
        proof: what was proved of its exact passes, ``None`` where none makes claims.
        seconds: time to make the artifact.
        completion: what the model makes of the prompt, sampled with the same seed in every stage.
    """

    name: str
    folder: str
    bytes: int
    bits_per_weight: float
    bits_per_byte: float
    largest_logit_change: float
    activations: str
    proof: Fact | None
    seconds: float
    completion: str


class Demo(BaseModel):
    """What the demo found.

    Attributes:
        held_out_bytes: size of the text that the models were scored on.
        xz_bits_per_byte: what ``xz -9e`` needs for it, for a sense of scale.
        prompt: what the models completed.
        stages: a row per artifact.
        report: the page about the last artifact, beside the exported model.
    """

    held_out_bytes: int
    xz_bits_per_byte: float
    prompt: str
    stages: list[Stage]
    report: str


def run_demo(output: Path, on_stage: Progress = silent, *, text: str | None = None) -> Demo:
    """Make every stage below ``output``, replacing artifacts of an earlier demo, and score each on text it never saw.

    Args:
        output: where the artifacts go, a folder each.
        on_stage: called when a stage begins.
        text: the text to score; source of held-out modules by default.

    Raises:
        GraphoptError: a stage failed.
    """
    text = held_out_text(MODULES) if text is None else text
    stages = []
    for number, name in enumerate((EXPORT, *RECIPES)):

        def say(stage: str, count: int = 0, total: int | None = None, number: int = number, name: str = name) -> None:
            share = count / total if total else 0.0
            on_stage(f"{name}: {stage}", round(100 * (number + share)), 100 * (1 + len(RECIPES)))

        folder, start = output / name, time.perf_counter()
        if name == EXPORT:
            manifest = export(MODEL, folder, overwrite=True, on_stage=say)
        else:
            manifest = optimize(output / EXPORT, name, folder, overwrite=True, on_stage=say).manifest
        seconds = time.perf_counter() - start
        say("judging it on held-out text", 1, 2)
        stages.append(_judge(name, folder, manifest, text, seconds))
    page = output / "report.html"
    on_stage("writing the report", 100 * (1 + len(RECIPES)), 100 * (1 + len(RECIPES)))
    options = PageOptions(locate_losses=True, groups=False, time=True)
    write(output / RECIPES[-1], page, output / EXPORT, options)
    size = len(text.encode())
    xz = 8 * len(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME)) / size
    return Demo(held_out_bytes=size, xz_bits_per_byte=xz, prompt=PROMPT, stages=stages, report=str(page))


def _judge(name: str, folder: Path, manifest: Manifest, text: str, seconds: float) -> Stage:
    session = load(folder)
    key = "largest_change_from_start"
    changes = [check.figures[key] for check in manifest.checks if key in check.figures]
    return Stage(
        name=name,
        folder=str(folder),
        bytes=sum(file.stat().st_size for file in folder.iterdir()),
        bits_per_weight=manifest.weights.bits_per_weight if manifest.weights else 0.0,
        bits_per_byte=evaluate(session, text).bits_per_byte,
        largest_logit_change=changes[-1] if changes else 0.0,
        activations=manifest.precision.activations if manifest.precision else "float32",
        proof=next((check.reason for check in manifest.checks if check.status == "proved"), None),
        seconds=seconds,
        completion=generate(session, PROMPT, max_new_tokens=48, sampling=SAMPLING)[0].text or "",
    )
