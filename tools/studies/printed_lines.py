"""Write lines of printed text as images, for networks that read them, such as those in rapidocr-onnxruntime.

    pip download rapidocr-onnxruntime==1.4.4 --no-deps && unzip -j rapidocr_onnxruntime-*.whl "*rec_infer.onnx"
    python tools/studies/printed_lines.py lines.npz others.npz
    graphopt search ch_PP-OCRv4_rec_infer.onnx --inputs lines.npz -o searched.yaml
    graphopt optimize ch_PP-OCRv4_rec_infer.onnx -r searched.yaml --inputs lines.npz -o reader
    graphopt quality ch_PP-OCRv4_rec_infer.onnx reader --inputs others.npz

Each file has eight lines of four words of Python's documentation, of 320 x 48 pixels in dark on light colours, in the
form of the network's input: float32 [8, 1, 3, 48, 320] from -1 to 1, under its name.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer
from PIL import Image, ImageDraw, ImageFont

# Run as a script, Python looks for modules in tools/ only.
sys.path.insert(0, str(Path(__file__).parents[2]))
from graphopt.quality.texts import documentation

WIDTH, HEIGHT, LINES, WORDS = 320, 48, 8, 4


def draw_line(text: str, random: np.random.Generator) -> npt.NDArray[Any]:
    """Return a line of text as the network reads it, float32 [3, height, width]."""
    image = Image.new("RGB", (WIDTH, HEIGHT), tuple(map(int, random.integers(170, 255, 3))))
    font = ImageFont.load_default(int(random.integers(HEIGHT // 2, HEIGHT * 4 // 5)))
    corner = 4, int(random.integers(0, HEIGHT // 5))
    ImageDraw.Draw(image).text(corner, text, fill=tuple(map(int, random.integers(0, 90, 3))), font=font)
    return (np.asarray(image, np.float32) / 127.5 - 1).transpose(2, 0, 1)


def main(
    files: Annotated[list[Path], typer.Argument(help="the .npz files to write, other lines in each")],
    name: Annotated[str, typer.Option(help="the input of the network")] = "x",
) -> None:
    """Write lines of printed text."""
    random, words = np.random.default_rng(0), documentation().split()
    for file in files:
        texts = [" ".join(random.choice(words, WORDS)) for _ in range(LINES)]
        lines: dict[str, Any] = {name: np.stack([draw_line(text, random) for text in texts])[:, None]}
        np.savez(file, **lines)


if __name__ == "__main__":
    typer.run(main)
