"""Compare the promises of `graphopt doctor --fix` with its results, and check families in which it must find nothing.

    python tools/studies/doctor.py                      # a planted graph for each fault that a pass mends
    python tools/studies/doctor.py --families           # exports of twelve small models of random weights

Faults are planted in products of 1024 x 2048 (`tests/compile/doctor/planted_models.py`), and in a recurrence of 256
tokens.
Bytes are those of all constants, so names and history of a graph do not count. Both files run in turn in one process
with one thread, one row (a recurrence: all tokens); a time is the least of all rounds, by the processor's clock.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import onnx_ir as ir
import typer

# Run as a script, Python looks for modules in tools/ only.
sys.path.insert(0, str(Path(__file__).parents[2]))
import graphopt
from graphopt.artifact import artifact as artifacts
from graphopt.compile.doctor import diagnose, mend
from graphopt.compile.doctor.examinations.float_products import weight_bytes
from graphopt.ort.session import open_session
from tests.compile.doctor import planted_models
from tests.passes.lift.canonicalize.recurrences.common import attention
from tools.bench.parts.machine import OtherLoad, describe

if TYPE_CHECKING:
    from collections.abc import Callable

    import onnxruntime

TIMES, TOKENS, ROUNDS = 8, 256, 41
TEXTS = ("llama", "qwen2", "gpt2", "gpt_neox", "phi3", "gemma3", "mixtral", "mamba2", "bert", "t5")
SIGNALS = ("vit", "resnet")


def scan(path: Path, times: int) -> Path:
    """Write a delta rule in a `Scan`; a state has 8 x 5 numbers."""
    del times
    ir.save(attention(delta=True, gated=False).scan(), path)
    return path


def codes(**options: Any) -> Callable[[Path, int], Path]:
    """Return a function that writes a product with codes."""
    return lambda path, times: planted_models.products_with_codes(path, times, **options)


FAULTS: dict[str, Callable[[Path, int], Path]] = {
    "accuracy-level, 4 bits": codes(),
    "accuracy-level, 8 bits": codes(bits=8),
    "float-zero-points, 2 bits": codes(bits=2, zeros="whole", level=4),
    "float-zero-points, 4 bits": codes(bits=4, zeros="whole", level=4),
    "repeated-weights": planted_models.repeated_products,
    "runtime-constants": planted_models.computed_constants,
    "float64": planted_models.doubles,
    "cast-circles": planted_models.casts,
    "unfused-products": planted_models.transposed_codes,
    "recurrence-in-loop": scan,
}


def feeds_of(session: onnxruntime.InferenceSession) -> dict[str, np.ndarray]:
    """Return random inputs of one row, of 256 tokens where an axis is one of tokens."""
    random = np.random.default_rng(0)
    feeds = {}
    for port in session.get_inputs():
        shape = [TOKENS if dim == "T" else dim if isinstance(dim, int) else 1 for dim in port.shape]
        feeds[port.name] = random.standard_normal(shape).astype(np.float32) / 8
    return feeds


def milliseconds(files: list[Path]) -> list[float]:
    """Return the least processor time of a run of each file, in turns."""
    sessions = []
    for file in files:
        entries = graphopt.read(file.parent).manifest.session if file.name == artifacts.MODEL else {}
        sessions.append(open_session(file, threads=1, entries=entries))
    feeds = feeds_of(sessions[0])
    seconds: list[list[float]] = [[] for _ in sessions]
    for _ in range(ROUNDS):
        for session, samples in zip(sessions, seconds, strict=True):
            start = time.process_time()
            session.run(None, feeds)
            samples.append(time.process_time() - start)
    return [min(samples) * 1e3 for samples in seconds]


def plant(name: str, folder: Path) -> str:
    """Return the row of a fault: promised and saved bytes, times of a run before and after."""
    file = FAULTS[name](folder / "planted.onnx", TIMES)
    result = mend(file, folder / "mended")
    if name.split(",")[0] not in [symptom.code for symptom in result.before.faults] or result.after.faults:
        raise SystemExit(f"{name}: {[symptom.code for symptom in result.before.faults]} was found")
    bytes_saved = weight_bytes(ir.load(file).graph) - weight_bytes(graphopt.read(folder / "mended").model.graph)
    before, after = milliseconds([file, folder / "mended" / artifacts.MODEL])
    figures = f"{result.before.bytes_saved:,} | {bytes_saved:,} | {before:.3f} | {after:.3f} | {before / after:.2f}"
    return f"| `{name}` | {', '.join(f'`{step}`' for step in result.steps)} | {figures} |"


def examine(name: str, folder: Path) -> str:
    """Return the row of a family: what is found in each graph of its export."""
    from tests import signals
    from tests.checkpoints import write_checkpoint

    if name in SIGNALS:
        signals.write_signal_checkpoint(name, folder / "checkpoint")
    else:
        write_checkpoint(name, folder / "checkpoint")
    graphopt.export(folder / "checkpoint", folder / "float32")
    findings = []
    for part in (folder / "float32", *sorted((folder / "float32").glob("*/"))):
        if (part / artifacts.MODEL).is_file():
            diagnosis = diagnose(part)
            findings += [f"{symptom.level} `{symptom.code}`" for symptom in diagnosis.symptoms]
            findings += [f"note {note.code}" for note in diagnosis.notes]
    return f"| {name} | {', '.join(findings) or 'nothing'} |"


def main(
    families: Annotated[bool, typer.Option("--families", help="exports of families instead of planted graphs")] = False,
    only: Annotated[str, typer.Option(help="names, with commas between")] = "",
) -> None:
    """Print a table."""
    load, names = OtherLoad(), only.split(",") if only else [*TEXTS, *SIGNALS] if families else list(FAULTS)
    if families:
        print("| family | found |\n| --- | --- |")
    else:
        print("| fault | steps | bytes promised | bytes saved | ms before | ms after | before / after |")
        print("| --- | --- | --- | --- | --- | --- | --- |")
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            print(examine(name, Path(folder)) if families else plant(name, Path(folder)), flush=True)
    print(f"{describe()}; others took {load.share():.0%} of the cores")


if __name__ == "__main__":
    typer.run(main)
