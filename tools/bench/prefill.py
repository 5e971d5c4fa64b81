"""Time a prompt that is read with dense and with sparse attention, and measure the loss of the tokens after it.

    python tools/bench/prefill.py                                  # SmolLM2, 7936 tokens; `make real` fetches it
    python tools/bench/make_llama.py llama-250m --positions 40960
    python tools/bench/prefill.py --model llama-250m --tokens 32768 --rounds 1
    python tools/bench/prefill.py policy=sparse_prefill,prefill_mass=0.9 policy=streaming,recent=1024

Each variant is a list of options of the step `sparse_kv`, after the steps of `--recipe`. The text is the documentation
of the Python language, repeated where the prompt is longer. The prompt goes through `Decoder.feed`; then the next 256
tokens are fed, 16 at a time, so that blocks of queries are never whole, and their logits are compared with those after
the dense prompt: KL in nats, mean and 99th percentile. A model of random weights attends to all tokens about equally:
there a mass says little, and a KL nothing. Rounds are interleaved, figures are medians. On a busy machine compare
processor seconds, with `--threads 1`: idle threads of onnxruntime spin.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import typer
from rich.console import Console
from rich.table import Table

# Run as a script, Python looks for modules in tools/ only.
sys.path.insert(0, str(Path(__file__).parents[2]))
import graphopt
from graphopt.inference.decoding.decoder import Decoder
from graphopt.passes.recipe import load_recipe
from tools.bench.parts.machine import OtherLoad, describe, quiet
from tools.bench.parts.options import JsonFile, token_count
from tools.studies.cache_quality import python_documentation
from tools.studies.real.models import fetch

NEXT, PIECE = 256, 16

Logs = npt.NDArray[np.float64]

_VARIANTS = ["policy=sparse_prefill,prefill_mass=0.9", "policy=sparse_prefill,prefill_mass=0.95"]


def read_prompt(folder: Path, ids: list[int], tokens: int, threads: int) -> tuple[float, float, Logs]:
    """Read a prompt; return its seconds, its processor seconds, and the log probabilities of the tokens after it."""
    session = graphopt.load(folder, threads=threads)
    prompt, following = (np.array([part], np.int64) for part in (ids[:tokens], ids[tokens : tokens + NEXT]))
    decoder = Decoder(session, 1, room=tokens + NEXT)
    begin, processor_begin = time.perf_counter(), time.process_time()
    for _ in decoder.feed(prompt):
        pass
    seconds, work = time.perf_counter() - begin, time.process_time() - processor_begin
    logits = [
        np.array(decoder.step(following[:, start : start + PIECE])[0], np.float64) for start in range(0, NEXT, PIECE)
    ]
    del decoder, session
    gc.collect()
    scores = np.concatenate(logits)
    scores -= scores.max(axis=1, keepdims=True)
    return seconds, work, scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))


def main(
    variants: Annotated[list[str] | None, typer.Argument(help="options of sparse_kv, with commas between them")] = None,
    model: Annotated[str, typer.Option(help="smollm2, a .gguf file, or a Hugging Face folder")] = "smollm2",
    recipe: Annotated[str, typer.Option(help="a preset or a file")] = "int4-rtn",
    storage: Annotated[str, typer.Option(help="of the cache, as quantize_kv calls it")] = "float32",
    tokens: Annotated[str, typer.Option(help="of the prompt")] = "7936",
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    json_file: JsonFile = None,
) -> None:
    """Compile each variant, read the prompt with all in turns, print a row for each."""
    from transformers import AutoTokenizer

    checkpoint = fetch(model) if model == "smollm2" else Path(model)
    source = {"gguf_file": checkpoint.name} if checkpoint.suffix == ".gguf" else {}
    tokenizer = AutoTokenizer.from_pretrained(str(checkpoint.parent if source else checkpoint), **source)
    text, count = tokenizer(python_documentation())["input_ids"], token_count(tokens)
    ids = (text * (-(-(count + NEXT) // len(text))))[: count + NEXT]
    codes = (["quantize_kv"], [f"quantize_kv.storage={storage}"]) if storage != "float32" else ([], [])
    recipes = {"dense": load_recipe(recipe, *codes)}
    for variant in variants or _VARIANTS:
        options = [f"sparse_kv.{option}" for option in variant.split(",")]
        recipes[variant] = load_recipe(recipe, [*codes[0], "sparse_kv"], [*codes[1], *options])
    seconds: dict[str, list[float]] = {name: [] for name in recipes}
    work: dict[str, list[float]] = {name: [] for name in recipes}
    logs_by_name: dict[str, Logs] = {}
    load = OtherLoad()
    with tempfile.TemporaryDirectory() as temporary:
        float_artifact = Path(temporary) / "float32"
        graphopt.export(checkpoint, float_artifact)
        for index, variant_recipe in enumerate(recipes.values()):
            graphopt.optimize(float_artifact, variant_recipe, Path(temporary) / str(index), run=False)
        for _ in range(rounds):
            for index, name in enumerate(recipes):
                read_seconds, processor_seconds, logs_by_name[name] = read_prompt(
                    Path(temporary) / str(index), ids, count, threads
                )
                seconds[name].append(read_seconds)
                work[name].append(processor_seconds)
                kl = (np.exp(logs_by_name["dense"]) * (logs_by_name["dense"] - logs_by_name[name])).sum(axis=1).mean()
                print(f"{name}: {read_seconds:.1f} s, {processor_seconds:.1f} s of processors, KL {kl:.4f}", flush=True)
    dense, next_ids = logs_by_name["dense"], np.array(ids[count + 1 : count + NEXT])
    head = ("prompt", "seconds", "times as fast", "of processors", "times less", "KL, mean", "KL, 99%", "perplexity")
    table, rows = Table(*head), []
    for name, logs in logs_by_name.items():
        kl = (np.exp(dense) * (dense - logs)).sum(axis=1)
        median, first = statistics.median(seconds[name]), statistics.median(seconds["dense"])
        processor_seconds, dense_work = statistics.median(work[name]), statistics.median(work["dense"])
        row = {
            "variant": name,
            "tokens": count,
            "seconds": median,
            "speedup": first / median,
            "work": processor_seconds,
            "less_work": dense_work / processor_seconds,
            "kl": float(kl.mean()),
            "kl_99": float(np.quantile(kl, 0.99)),
            "perplexity": float(np.exp(-logs[np.arange(NEXT - 1), next_ids].mean())),
        }
        rows.append(row)
        times = (
            f"{median:.1f}",
            f"{first / median:.2f}",
            f"{processor_seconds:.1f}",
            f"{dense_work / processor_seconds:.2f}",
        )
        table.add_row(name, *times, f"{row['kl']:.4f}", f"{row['kl_99']:.3f}", f"{row['perplexity']:.3f}")
    console = Console(width=120)
    console.print(f"{describe()}; {threads} threads, {rounds} rounds, {recipe}, {storage}, {count} tokens")
    console.print(table)
    console.print(quiet(load.share()), highlight=False)
    if json_file is not None:
        json_file.write_text(json.dumps({"machine": describe(), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
