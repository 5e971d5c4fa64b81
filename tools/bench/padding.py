"""Time an encoder with and without the step `pack_tokens`, on batches of texts of mixed length, in one process.

    python tools/bench/padding.py float32                      # an artifact of an encoder with its tokenizer
    python tools/bench/padding.py float32 --recipe w8a8 --batch 16 --longest 512 --rounds 31

Texts are the docstrings of Python's standard library, in one random order: such texts are embedded for code search. `as
they come` batches them in this order, as a server does; `by length` sorts them by length first, as
`EncoderSession.embed` does. Both models take turns on the same batch; times are medians over batches, ratios medians of
the ratios of each batch.
"""

from __future__ import annotations

import ast
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

# Run as a script, Python looks for modules in tools/ only.
sys.path.insert(0, str(Path(__file__).parents[2]))
import graphopt
from graphopt.analysis.structure.ports import HIDDEN
from graphopt.inference.embeddings import EncoderSession
from graphopt.ort.session import open_session, run
from graphopt.runtime_ops.instructions import instructions_here
from graphopt.util.stdlib_text import training_texts
from tools.bench.parts.machine import OtherLoad, describe, quiet

WITH_PADDING, WITHOUT_PADDING = "padded", "packed"

Batch = tuple[np.ndarray, np.ndarray]


def docstrings() -> Iterator[str]:
    """Yield the docstrings of Python's standard library without its tests, some of which are not valid Python."""
    for source in (source for path, source in training_texts().items() if "test" not in path):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text:
                    yield text


def batches_of(sequences: list[list[int]], size: int) -> list[Batch]:
    """Return batches of tokens and masks, each as long as its longest text; the last incomplete one is left out."""
    batches = []
    for start in range(0, len(sequences) - size + 1, size):
        rows = sequences[start : start + size]
        length = max(map(len, rows))
        ids, mask = (np.zeros((size, length), np.int64) for _ in range(2))
        for row, tokens in enumerate(rows):
            ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, 1
        batches.append((ids, mask))
    return batches


def compare(sessions: dict[str, EncoderSession], batches: list[Batch], title: str) -> None:
    """Time both models on the same batches; print medians and the largest difference of their hidden states."""
    times: dict[str, list[float]] = {name: [] for name in sessions}
    largest = 0.0
    for number, (ids, mask) in enumerate([batches[0], *batches]):
        states = {}
        for name in random.sample(list(sessions), len(sessions)):
            session = sessions[name]
            feeds = session.interface.feeds(ids, mask)
            start = time.perf_counter()
            states[name] = run(session.inference, [HIDDEN], feeds)[0]
            if number:  # the first call sets up
                times[name].append(1e3 * (time.perf_counter() - start))
        change = (
            np.abs(states[WITH_PADDING] - states[WITHOUT_PADDING])[mask > 0].max()
            / np.abs(states[WITH_PADDING][mask > 0]).max()
        )
        largest = max(largest, float(change))
    share = sum(int(mask.sum()) for _, mask in batches) / sum(mask.size for _, mask in batches)
    ratio = statistics.median(a / b for a, b in zip(times[WITH_PADDING], times[WITHOUT_PADDING], strict=True))
    medians = ", ".join(f"{name} {statistics.median(durations):.1f} ms" for name, durations in times.items())
    print(f"  {title:12} {share:4.0%} tokens: {medians}; {ratio:.2f} times as fast; largest change {largest:.1e}")


def main(
    model: Annotated[Path, typer.Argument(help="the artifact of an encoder")],
    recipe: Annotated[str, typer.Option(help="what both are optimized by")] = "rotate",
    batch: Annotated[int, typer.Option(help="texts of a batch", min=1)] = 32,
    longest: Annotated[int, typer.Option(help="tokens at which texts are cut", min=2)] = 256,
    threads: Annotated[int, typer.Option(help="of onnxruntime")] = 1,
    rounds: Annotated[int, typer.Option(help="batches of each kind", min=1)] = 15,
) -> None:
    """Compare an encoder with padding and without."""
    load = OtherLoad()
    with tempfile.TemporaryDirectory() as folder:
        sessions = {}
        for name, steps in ((WITH_PADDING, []), (WITHOUT_PADDING, ["pack_tokens"])):
            artifact = Path(folder) / name
            graphopt.optimize(model, graphopt.load_recipe(recipe, add=steps), artifact, quality_tokens=0)
            encoder = graphopt.load_encoder(artifact)
            entries = {**encoder.manifest.session, "session.intra_op.allow_spinning": "0"}
            inference = open_session(encoder.file, threads=threads, entries=entries)
            sessions[name] = EncoderSession(
                encoder.file, inference, encoder.interface, encoder.manifest, encoder.tokenizer
            )
        texts = list(dict.fromkeys(docstrings()))
        random.Random(0).shuffle(texts)
        sequences = [sessions[WITH_PADDING].encode(text)[:longest] for text in texts[: batch * rounds]]
        lengths = sorted(map(len, sequences))
        print(
            f"{model.name}, {recipe}, {rounds} batches of {batch} docstrings of {lengths[0]} to {lengths[-1]} tokens, "
            f"half of them under {lengths[len(lengths) // 2]}; {threads} threads, {instructions_here()}"
        )
        compare(sessions, batches_of(sequences, batch), "as they come")
        compare(sessions, batches_of(sorted(sequences, key=len), batch), "by length")
    print(f"{describe()}; {quiet(load.share())}")


if __name__ == "__main__":
    typer.run(main)
