"""Measure the memory and time to rotate and quantize a large model, beside copying its bytes.

python tools/studies/rotate_large.py --json rotate_large.json
python tools/studies/rotate_large.py --steps rotate-int4 --jobs 1 --jobs 2

The model is Llama-shaped, with random weights, and is exported as any other. Each step runs in a process of its own,
whose peak of resident memory the system reports; it counts pages of mapped files too.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

MAKE = """
import sys, torch, transformers
from graphopt.models.export import export
layers, hidden, inner, vocabulary = map(int, sys.argv[2:6])
config = transformers.LlamaConfig(
    num_hidden_layers=layers, hidden_size=hidden, intermediate_size=inner, vocab_size=vocabulary,
    num_attention_heads=hidden // 64, num_key_value_heads=hidden // 256, max_position_embeddings=4096,
    tie_word_embeddings=False,
)
torch.manual_seed(0)
folder = sys.argv[1] + "/checkpoint"
model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float16)
model.save_pretrained(folder)
del model
export(folder, sys.argv[1] + "/float32")
"""
OPTIMIZE = """
import sys, hashlib, os, resource, json, time
from graphopt import artifact
from graphopt.compile.pipeline import optimize
from graphopt.passes.recipe import load_recipe
begin = time.perf_counter()
if sys.argv[3] == "copy":
    artifact.write(artifact.read(sys.argv[1]), sys.argv[2])
    proof = None
else:
    made = optimize(sys.argv[1], load_recipe(sys.argv[3]), sys.argv[2], run=False, jobs=int(sys.argv[4]))
    (proof,) = [check for check in made.manifest.checks if check.name == "certificate"]
print(json.dumps({
    "seconds": time.perf_counter() - begin,
    "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    "peak_bytes_of_a_worker": 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss,
    "load": os.getloadavg()[0],
    "sha256": hashlib.file_digest(open(sys.argv[2] + "/model.onnx.data", "rb"), "sha256").hexdigest(),
    "certificate": proof and proof.status,
    "certificate_seconds": proof and proof.figures["seconds"],
}))
"""


def main(
    layers: int = 16,
    hidden: Annotated[int, typer.Option(help="a multiple of 256")] = 2048,
    inner: int = 8192,
    vocabulary: int = 32000,
    steps: Annotated[list[str] | None, typer.Option(help="presets, or copy; by default the exact ones")] = None,
    jobs: Annotated[list[int] | None, typer.Option(help="processes; several numbers are compared")] = None,
    folder: Annotated[Path | None, typer.Option(help="where to work; needs five times the model's size")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the figures here too")] = None,
) -> None:
    """Make the model, copy it, run the steps with each number of jobs, and report each."""
    with tempfile.TemporaryDirectory(dir=folder) as work:
        run(MAKE, work, layers, hidden, inner, vocabulary)
        source = Path(work) / "float32"
        size = sum(file.stat().st_size for file in source.iterdir())
        largest = 4 * hidden * max(inner, vocabulary)
        rows: list[dict[str, Any]] = [{"step": "plain copy of the files", **copy(source, Path(work) / "copied")}]
        for step, count in itertools.product(steps or ("copy", "rotate", "rotate-online"), jobs or (1,)):
            target = Path(work) / step
            rows.append({"step": step, "jobs": count, **json.loads(run(OPTIMIZE, source, target, step, count))})
            shutil.rmtree(target)
    table = Table(
        "step", "jobs", "seconds", "peak memory", "of a worker", "certificate", "of that seconds", "load", "sha256"
    )
    for row in rows:
        peak, proof = row.get("peak_bytes"), row.get("certificate_seconds")
        table.add_row(
            row["step"],
            str(row.get("jobs", "")),
            f"{row['seconds']:.1f}",
            "" if peak is None else f"{peak / 1e9:.2f} GB",
            f"{row['peak_bytes_of_a_worker'] / 1e9:.2f} GB" if row.get("jobs", 1) > 1 else "",
            row.get("certificate") or "",
            "" if proof is None else f"{proof:.1f}",
            f"{row['load']:.1f}" if "load" in row else "",
            row.get("sha256", "")[:8],
        )
    console = Console()
    console.print(
        f"{size / 1e9:.2f} GB on disk, {size / 4e9:.2f} billion weights; its largest tensor has {largest / 1e6:.0f} MB"
    )
    console.print(table)
    if json_file is not None:
        json_file.write_text(json.dumps({"bytes": size, "largest_tensor": largest, "rows": rows}, indent=2) + "\n")


def run(script: str, *arguments: object) -> str:
    """Run ``script`` in a separate process, offline, and return what it prints."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout


def copy(source: Path, target: Path) -> dict[str, float]:
    """Copy a folder, to the disk and not to the system's cache only, and return how long that took."""
    begin = time.perf_counter()
    shutil.copytree(source, target)
    os.sync()
    seconds = time.perf_counter() - begin
    shutil.rmtree(target)
    return {"seconds": seconds}


if __name__ == "__main__":
    typer.run(main)
