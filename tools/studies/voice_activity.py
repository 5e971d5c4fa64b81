"""The preset int8 on the files of silero-vad, judged on a synthetic voice that they read step by step.

    pip download silero-vad==6.2.3 --no-deps && unzip silero_vad-*.whl 'silero_vad/data/*.onnx'
    python tools/studies/voice_activity.py silero_vad/data

The voice is a sum of harmonics with three formants and pauses, over noise: the detector finds speech and silence in it.
Both files read it in chunks of 32 ms, each with its own state; the table has the size, the cosine of the probabilities,
the share of chunks with the same answer, and the processor time of a chunk, the least of five turns.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import typer

import graphopt
from graphopt.ort.session import open_session

RATE, CHUNK, CONTEXT, SECONDS = 16000, 512, 64, 6
FILES = ("silero_vad", "silero_vad_16k_op15", "silero_vad_op18_ifless", "silero_vad_half")
FORMANTS = ((600, 150), (1200, 200), (2600, 300))
Floats = npt.NDArray[np.float32]


def voice() -> Floats:
    """Return a voice of 100 to 140 Hz with syllables and pauses, float32 [samples]."""
    times = np.arange(RATE * SECONDS) / RATE
    phase = 2 * np.pi * np.cumsum(120 + 20 * np.sin(np.pi * times)) / RATE
    sound = np.zeros_like(times)
    for harmonic in range(1, 30):
        gain = sum(np.exp(-(((harmonic * 120 - center) / width) ** 2)) for center, width in FORMANTS)
        sound += gain * np.sin(harmonic * phase)
    syllables = (np.sin(1.4 * np.pi * times) > 0) * np.abs(np.sin(6 * np.pi * times))
    noise = np.random.default_rng(0).standard_normal(len(times))
    result: Floats = (0.2 * sound * syllables + 0.003 * noise).astype(np.float32)
    return result


def listen(file: Path, sound: Floats) -> tuple[Floats, float]:
    """Return the probability of speech of each chunk, and the processor time of one in microseconds."""
    session = open_session(file, threads=1)
    names = {port.name for port in session.get_inputs()}
    state, context = np.zeros((2, 1, 128), np.float32), np.zeros((1, CONTEXT), np.float32)
    answers = []
    start = time.process_time()
    for chunk in sound[: len(sound) // CHUNK * CHUNK].reshape(-1, 1, CHUNK):
        samples = np.concatenate([context, chunk], 1)
        feeds = {"input": samples, "state": state, "sr": np.array(RATE)}
        answer, state = session.run(None, {name: array for name, array in feeds.items() if name in names})
        answers.append(answer.item())
        context = samples[:, -CONTEXT:]
    return np.array(answers, np.float32), (time.process_time() - start) / len(answers) * 1e6


def main(folder: Annotated[Path, typer.Argument(help="the .onnx files of silero-vad")]) -> None:
    """Print a line for each file."""
    sound = voice()
    print("| file | MB: as it is; `int8` | cosine | same answer | microseconds: as it is; `int8` |")
    print("| --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as temporary:
        for name in FILES:
            file, small = folder / f"{name}.onnx", Path(temporary) / name
            graphopt.optimize(file, "int8", small)
            turns = [(listen(file, sound), listen(small / "model.onnx", sound)) for _ in range(5)]
            (before, _), (after, _) = turns[0]
            cosine = float(before @ after / np.linalg.norm(before) / np.linalg.norm(after))
            same_share = float(((before > 0.5) == (after > 0.5)).mean())
            sizes = file.stat().st_size / 1e6, sum(part.stat().st_size for part in small.glob("model.onnx*")) / 1e6
            times = [min(turn[side][1] for turn in turns) for side in (0, 1)]
            figures = (
                f"{sizes[0]:.2f}; {sizes[1]:.2f} | {cosine:.4f} | {same_share:.3f} | {times[0]:.0f}; {times[1]:.0f}"
            )
            print(f"| `{name}` | {figures} |")


if __name__ == "__main__":
    typer.run(main)
