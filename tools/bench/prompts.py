"""Time prompts of different length in one batch: together with padding, and one after the other.

    python tools/bench/prompts.py made
    python tools/bench/prompts.py made --lengths 100,200,300,400 --rounds 7

An artifact with caches in pages is needed, whose session runs graphopt's kernels. Both ways leave the same cache; see
graphopt/inference/decoding/unpadded_prefill.py. Rounds are interleaved, figures are medians.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Annotated
from unittest import mock

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

# Run as a script, Python looks for modules in tools/ only.
sys.path.insert(0, str(Path(__file__).parents[2]))
from graphopt.errors import InputError
from graphopt.inference.decoding import decoder as decoding
from graphopt.inference.decoding.unpadded_prefill import is_faster_unpadded
from graphopt.inference.session import load
from graphopt.quality.texts import held_out_texts

_LENGTHS = ["100,200,300,400,500,600,700,800", "64,64,64,900", "8,16,24,200", "500,500,500,500"]


def main(
    folder: Annotated[Path, typer.Argument(help="an artifact with caches in pages, and a tokenizer")],
    lengths: Annotated[
        list[str], typer.Option(help="tokens of each prompt; several batches give several rows")
    ] = _LENGTHS,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    threads: Annotated[int, typer.Option(help="0 lets the engine choose")] = 0,
) -> None:
    """Print a row for each batch."""
    session = load(folder, threads=threads)
    if not session.interface.has_pages:
        raise InputError("its caches grow", file=folder, remedy="make it with --target ort-cpu")
    text = session.require_tokenizer().encode(held_out_texts()[0][:200_000], add_special_tokens=False).ids
    table = Table("tokens of the prompts", "with padding, ms", "apart, ms", "ratio", "chosen")
    for batch in lengths:
        counts = np.array([int(count) for count in batch.split(",")])
        longest = int(counts.max())
        mask = (np.arange(longest) >= longest - counts[:, None]).astype(np.int64)
        ids = np.stack([np.array(text[longest * row : longest * (row + 1)]) for row in range(len(counts))])
        samples: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(rounds):
            for is_unpadded, seconds in samples.items():
                decoder = decoding.Decoder(session, len(counts), room=longest)
                with mock.patch.object(
                    decoding, "is_faster_unpadded", lambda mask, is_unpadded=is_unpadded: is_unpadded
                ):
                    begin = time.perf_counter()
                    for _ in decoder.feed(ids, mask):
                        pass
                    seconds.append(time.perf_counter() - begin)
        padded_ms, unpadded_ms = (statistics.median(seconds) * 1e3 for seconds in (samples[False], samples[True]))
        choice = "apart" if is_faster_unpadded(mask) else "padding"
        table.add_row(batch, f"{padded_ms:.0f}", f"{unpadded_ms:.0f}", f"{padded_ms / unpadded_ms:.2f}", choice)
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
