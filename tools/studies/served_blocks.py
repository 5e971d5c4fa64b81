"""Measure how far int4 blocks of the server move the logits of the shipped model, beside int4 pages.

    python tools/studies/served_blocks.py                           # prompts of 20 to 500 tokens; two minutes
    python tools/studies/served_blocks.py --first 20 --last 200 --step 10 --json served_blocks.json

Prompts are the beginnings of a module of Python's library. The change is that of the logits behind a prompt, the
largest of all tokens of the vocabulary, over the largest logit of the float model behind any prompt. All caches are
rotated and have keys rounded for queries, as the preset ``rotate-kv4``. Pages leave the first and the newest in floats,
so up to 192 tokens change nothing; in blocks every token is rounded at once.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import numpy.typing as npt
import typer
from rich.console import Console
from rich.table import Table

# Run as a script, Python looks for modules in tools/ only.
sys.path.insert(0, str(Path(__file__).parents[2]))
import graphopt
from graphopt.inference.decoding.decoder import Decoder
from graphopt.ort.session import open_session
from graphopt.passes.algebra.fold_norms.fold_norms import FoldNorms
from graphopt.passes.algebra.rotate.rotate import Rotate
from graphopt.passes.cache.quantize_kv import QuantizeKV
from graphopt.passes.interface.serve.serve import Serve
from graphopt.passes.lift.canonicalize import Canonicalize
from graphopt.passes.recipe import Recipe
from graphopt.tasks.causal_lm.interface import Interface
from tools.bench.parts.options import JsonFile

if TYPE_CHECKING:
    from collections.abc import Sequence

Singles = npt.NDArray[np.float32]

_BATCH = 8
"""Prompts of a call."""


@dataclass(frozen=True)
class Row:
    """How far a cache moves logits.

    Attributes:
        cache: what it is.
        mean: of all prompts, the change as the module says.
        up_to_192: the same of prompts of up to 192 tokens.
        largest: of all prompts.
    """

    cache: str
    mean: float
    up_to_192: float
    largest: float


def caches() -> dict[str, tuple[QuantizeKV, Serve | None]]:
    """Return what is measured: pages of one request, and blocks."""
    int4 = QuantizeKV(storage="int4", key_feedback=True)
    white = QuantizeKV(storage="int4", key_feedback=True, key_whitening=True)
    return {
        "pages": (int4, None),
        "blocks of 64, one code for each token": (int4, Serve(block=64, residuals=False)),
        "blocks of 64": (int4, Serve(block=64)),
        "blocks of 128": (int4, Serve(block=128)),
        "blocks of 128, key_whitening": (white, Serve(block=128)),
    }


def served_logits(folder: Path, prompts: Sequence[list[int]]) -> Singles:
    """Return the logits [prompts, vocabulary] behind prompts, of a graph that requests share."""
    session = open_session(folder / "model.onnx", threads=1)
    interface, rows = Interface.of_session(session), []
    for begin in range(0, len(prompts), _BATCH):
        batch = prompts[begin : begin + _BATCH]
        longest = max(map(len, batch))
        ids, mask = np.zeros((2, len(batch), longest), np.int64)
        for row, prompt in enumerate(batch):
            ids[row, longest - len(prompt) :], mask[row, longest - len(prompt) :] = prompt, 1
        feeds = interface.feeds(ids, mask, interface.empty_past(len(batch), longest))
        rows.append(session.run(["logits"], feeds)[0])
    return np.concatenate(rows)


def paged_logits(folder: Path, text: list[int], lengths: Sequence[int]) -> Singles:
    """Return the logits [lengths, vocabulary] behind so many tokens of a text, which come one by one."""
    decoder, rows = Decoder(graphopt.load(folder, threads=1), 1), []
    for count, token in enumerate(text[: max(lengths)], 1):
        logits = decoder.step(np.array([[token]], np.int64))
        if count in lengths:
            rows.append(np.array(logits[0, -1], np.float32))
    return np.stack(rows)


def measure(text: list[int], lengths: Sequence[int], source: Path, temporary: Path) -> list[Row]:
    """Return a row for each of :func:`caches`.

    Args:
        text: tokens.
        lengths: of the prompts, the beginnings of the text, rising.
        source: an exported model.
        temporary: a folder for artifacts.
    """
    prompts = [text[:length] for length in lengths]

    def compile_with(name: str, *steps: Any) -> Path:
        target = temporary / name
        recipe = Recipe(name=name, steps=(Canonicalize(), *steps))
        graphopt.optimize(source, recipe, target, run="parts", quality_tokens=0)
        return target

    float_logits = served_logits(compile_with("floats", Serve()), prompts)
    short, rows = np.array(lengths) <= 192, []
    for number, (name, (quantize, serve)) in enumerate(caches().items()):
        steps = [FoldNorms(), Rotate(query_key="hadamard"), quantize, *([] if serve is None else [serve])]
        folder = compile_with(str(number), *steps)
        logits = paged_logits(folder, text, lengths) if serve is None else served_logits(folder, prompts)
        changes = np.abs(logits - float_logits).max(-1) / np.abs(float_logits).max()
        rows.append(Row(name, float(changes.mean()), float(changes[short].mean()), float(changes.max())))
    return rows


def main(
    first: Annotated[int, typer.Option(min=1, help="tokens of the shortest prompt")] = 20,
    last: Annotated[int, typer.Option(min=1, help="tokens of the longest, at most")] = 500,
    step: Annotated[int, typer.Option(min=1, help="by which lengths rise")] = 8,
    json_file: JsonFile = None,
) -> None:
    """Export the shipped model, make each cache, print how far logits move."""
    lengths = range(first, last + 1, step)
    if not lengths or first > 192:
        raise typer.BadParameter(f"lengths rise from at most 192, and {first} to {last} are none or longer")
    with tempfile.TemporaryDirectory() as name:
        temporary = Path(name)
        graphopt.export("stdlib_lm", temporary / "source")
        text = graphopt.load(temporary / "source", threads=1).encode(Path(json.__file__).read_text(encoding="utf-8"))
        if len(text) < lengths[-1]:
            raise typer.BadParameter(f"the text has {len(text)} tokens, not {lengths[-1]}")
        rows = measure(text, lengths, temporary / "source", temporary)
    table = Table("int4 cache", "mean", "up to 192 tokens", "largest")
    for row in rows:
        table.add_row(row.cache, *(f"{figure:.2%}" for figure in (row.mean, row.up_to_192, row.largest)))
    Console().print(f"{len(lengths)} prompts of {lengths[0]} to {lengths[-1]} tokens")
    Console().print(table)
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
