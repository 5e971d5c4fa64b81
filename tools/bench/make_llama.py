"""Write a Llama of random weights as a Hugging Face checkpoint, to measure speed.

    python tools/bench/make_llama.py llama-250m            # 254 million parameters

The tokenizer is the shipped model's, whose vocabulary is a part of this one.
"""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Annotated

import typer

from graphopt.models.export import shipped_models

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def make_llama(
    folder: Annotated[Path, typer.Argument(help="where to write")],
    *,
    layers: int = 16,
    hidden: int = 1024,
    inner: int = 2816,
    heads: int = 16,
    key_value_heads: int = 8,
    vocabulary: int = 32000,
    positions: int = 4096,
    seed: int = 0,
) -> int:
    """Write the checkpoint in float16 and return its number of parameters."""
    import torch
    import transformers

    config = transformers.LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        vocab_size=vocabulary,
        max_position_embeddings=positions,
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float16)
    model.save_pretrained(folder)
    tokenizer_folder = shipped_models()["stdlib_lm"]
    for name in _TOKENIZER:
        shutil.copy(tokenizer_folder / name, folder)
    return sum(parameter.numel() for parameter in model.parameters())


@functools.wraps(make_llama)
def main(folder: Path, **options: int) -> None:
    print(json.dumps({"folder": str(folder), "parameters": make_llama(folder, **options)}))


if __name__ == "__main__":
    typer.run(main)
