"""Write a Llama checkpoint as a GGUF file, with its byte-level tokens: llama.cpp runs it beside graphopt.

python tools/bench/make_gguf.py graphopt/models/stdlib_lm model.gguf
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

# Run as a script, Python looks for modules in tools/ only.
sys.path.insert(0, str(Path(__file__).parents[2]))
from tools.bench.parts.gguf_file import write_gguf


def main(
    checkpoint: Annotated[Path, typer.Argument(help="a Hugging Face folder of a Llama")],
    file: Annotated[Path, typer.Argument(help="where to write")],
) -> None:
    """Write the file, matrices in float16."""
    write_gguf(checkpoint, file, tokenizer=True)


if __name__ == "__main__":
    typer.run(main)
