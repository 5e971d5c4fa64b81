"""Measure files of prompts: their bytes, the time to load them and to read the prompt, and the KL of each `--loss`.

    python tools/bench/prompt_cache.py                       # SmolLM2, 7936 tokens; `make real` fetches it
    python tools/bench/prompt_cache.py --tokens 2048 --recipe kv4

The text is the documentation of the Python language. A prompt is read once and saved with each loss; each file is
loaded, and the next 256 tokens (`--next`) are fed after it, 16 at a time: the KL, in nats, is from the logits after
states that were never saved. `of states` is the size of the file over that of the states in memory, `of pages` the same
without pages that are still floats. `zstandard` compresses the bytes of the states in memory. Seconds are processor
time of one thread, as other programs may use the machine.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, get_args

import numpy as np
import typer
import zstandard
from rich.console import Console
from rich.table import Table
from safetensors import safe_open

# Run as a script, Python looks for modules in tools/ only.
sys.path.insert(0, str(Path(__file__).parents[2]))
import graphopt
from graphopt.inference.decoding.decoder import Decoder
from graphopt.inference.states.compression import Loss
from tools.bench.parts.continuation import logs_behind
from tools.bench.parts.machine import describe
from tools.bench.parts.options import JsonFile, token_count
from tools.studies.cache_quality import python_documentation
from tools.studies.real.models import fetch


def main(
    model: Annotated[Path | None, typer.Argument(help="an artifact; SmolLM2 is made by default")] = None,
    recipe: Annotated[str, typer.Option(help="of SmolLM2, a preset or a file")] = "rotate-kv4-rtn",
    tokens: Annotated[str, typer.Option(help="of the prompt")] = "7936",
    following: Annotated[int, typer.Option("--next", min=1, help="tokens after it that are compared")] = 256,
    json_file: JsonFile = None,
) -> None:
    """Read the prompt, save and load it with each loss, print a row for each."""
    count = token_count(tokens)
    head = ("file", "bytes", "of states", "of pages", "saving", "loading", "of reading", "KL, mean", "KL, 99%")
    table, rows = Table(*head), []
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / "prompt.cache"
        if model is None:
            model = Path(temporary) / "model"
            graphopt.export(fetch("smollm2"), Path(temporary) / "float32")
            graphopt.optimize(Path(temporary) / "float32", recipe, model, run=False)
        session = graphopt.load(model, threads=1)
        ids = np.array(session.encode(python_documentation()), np.int64)
        decoder, begin = Decoder(session, 1, room=count + following), time.process_time()
        for _ in decoder.feed(ids[None, :count]):
            pass
        reading = time.process_time() - begin
        states = decoder.states.save(decoder.tokens).arrays
        in_floats = {name for name in states if name.endswith(".recent")}
        state_bytes = sum(array.nbytes for array in states.values())
        page_bytes = state_bytes - sum(states[name].nbytes for name in in_floats)
        zstd: int = sum(len(zstandard.compress(array.tobytes(), 3)) for array in states.values())
        reference_logs = logs_behind(decoder.fork([0]), ids[count : count + following])
        for loss in get_args(Loss):
            begin = time.process_time()
            decoder.save(file, loss=loss)
            saving, begin = time.process_time() - begin, time.process_time()
            restored_decoder = Decoder.restore(session, file)
            loading = time.process_time() - begin
            logs = logs_behind(restored_decoder, ids[count : count + following])
            kl = (np.exp(reference_logs) * (reference_logs - logs)).sum(axis=1)
            with safe_open(file, framework="numpy") as reader:
                floats = sum(reader.get_tensor(name).nbytes for name in in_floats)
            size = file.stat().st_size
            row = {
                "loss": loss,
                "bytes": size,
                "of_states": size / state_bytes,
                "of_pages": (size - floats) / page_bytes,
                "saving": saving,
                "loading": loading,
                "reading": reading,
                "kl": float(kl.mean()),
                "kl_99": float(np.quantile(kl, 0.99)),
            }
            rows.append(row)
            shares = (f"{row['of_states']:.3f}", f"{row['of_pages']:.3f}")
            times = (f"{saving:.1f} s", f"{loading:.1f} s", f"{loading / reading:.3f}")
            table.add_row(loss, f"{size:,}", *shares, *times, f"{row['kl']:.5f}", f"{row['kl_99']:.4f}")
    console = Console(width=120)
    console.print(f"{describe()}; {count} tokens, read in {reading:.1f} s of a processor; states {state_bytes:,} bytes")
    console.print(table)
    console.print(f"zstandard, level 3, of the states as they lie: {zstd:,} bytes, {zstd / state_bytes:.3f}")
    if json_file is not None:
        content = {"machine": describe(), "tokens": count, "states": state_bytes, "zstandard": zstd, "rows": rows}
        json_file.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
