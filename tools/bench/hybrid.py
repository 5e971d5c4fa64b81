"""Time a hybrid model: prompts with a common prefix, and steps after texts of several lengths.

    python tools/bench/hybrid.py                               # random weights, gated DeltaNet in three layers of four
    python tools/bench/hybrid.py stdlib_hybrid --shared 900 --contexts 100,900

The first request reads a document and a question, the second the same document and another question, both with one
`PrefixCache`; a time is that to the first token. Steps are timed after texts of each length, with attention to all
tokens and to the first and newest alone (streaming). Other load on a machine only adds to a time: the least is shown.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

# Run as a script, Python looks for modules in tools/ only.
sys.path.insert(0, str(Path(__file__).parents[2]))
import graphopt
from graphopt.inference.decoding.decoder import Decoder
from graphopt.inference.prefix_cache import PrefixCache
from graphopt.inference.session import Session, load
from graphopt.passes.recipe import Recipe

CACHES = {"all tokens": {"step": "page_kv"}, "streaming": {"step": "sparse_kv", "policy": "streaming"}}
QUESTION = 32
"""Tokens of a question."""


def make_hybrid(folder: Path, positions: int) -> Path:
    """Write a Qwen3-Next of random weights without experts, with 8 layers, and return its export."""
    import torch
    import transformers

    layers = 8
    config = transformers.Qwen3NextConfig(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1280,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        layer_types=["linear_attention" if (layer + 1) % 4 else "full_attention" for layer in range(layers)],
        mlp_only_layers=list(range(layers)),
        max_position_embeddings=positions,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "checkpoint")
    graphopt.export(folder / "checkpoint", folder / "float32", run=False)
    return folder / "float32"


def time_requests(session: Session, shared_tokens: int, rounds: int) -> tuple[float, float, int]:
    """Return the least seconds to the first token of two requests, and the tokens that the second fed."""
    numbers, fed_tokens = np.random.default_rng(0), 0
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        cache = PrefixCache(session)
        document = numbers.integers(0, session.interface.vocabulary or 2, shared_tokens).tolist()
        for seconds in times:
            question = numbers.integers(0, session.interface.vocabulary or 2, QUESTION).tolist()
            begin = time.perf_counter()
            graphopt.generate(session, [[*document, *question]], max_new_tokens=1, cache=cache)
            seconds.append(time.perf_counter() - begin)
        fed_tokens = cache.fed_tokens
    return min(times[0]), min(times[1]), fed_tokens


def time_steps(session: Session, lengths: list[int], steps: int) -> dict[int, float]:
    """Return the least seconds of a step of one token after each number of tokens."""
    numbers, decoder, fastest = np.random.default_rng(0), Decoder(session, 1, room=max(lengths) + steps * 8), {}
    for length in sorted(lengths):
        new = numbers.integers(0, session.interface.vocabulary or 2, (1, length - int(decoder.tokens[0])))
        for _ in decoder.feed(new):
            pass
        times = []
        for _ in range(steps):
            begin = time.perf_counter()
            decoder.step(new[:, :1])
            times.append(time.perf_counter() - begin)
        fastest[length] = min(times)
    return fastest


def main(
    folder: Annotated[Path | None, typer.Argument(help="an artifact with states; by default a random one")] = None,
    shared_tokens: Annotated[int, typer.Option("--shared", help="tokens that both requests begin with")] = 4096,
    contexts: Annotated[str, typer.Option(help="tokens in front of a step")] = "1k,4k,16k,64k",
    caches: Annotated[str, typer.Option(help=", ".join(CACHES))] = ",".join(CACHES),
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    steps: Annotated[int, typer.Option(min=1, help="timed after each length")] = 40,
    threads: Annotated[int, typer.Option(min=1)] = 2,
) -> None:
    """Print milliseconds to the first token of both requests, and of a step after each length."""
    lengths = [int(word.removesuffix("k")) * (1024 if word.endswith("k") else 1) for word in contexts.split(",")]
    with tempfile.TemporaryDirectory(prefix="hybrid-") as temporary:
        source = make_hybrid(Path(temporary), max([shared_tokens, *lengths]) + 1024) if folder is None else folder
        for name in caches.split(","):
            recipe = Recipe.model_validate({"name": "caches", "steps": [{"step": "canonicalize"}, CACHES[name]]})
            graphopt.optimize(source, recipe, Path(temporary) / "made", run=False, overwrite=True, quality_tokens=0)
            session = load(Path(temporary) / "made", threads=threads)
            first, second, fed_tokens = time_requests(session, shared_tokens, rounds)
            typer.echo(
                f"{name}: first request {first * 1e3:.0f} ms, second {second * 1e3:.0f} ms, which fed {fed_tokens} of "
                f"{shared_tokens + QUESTION} tokens: {second / first:.3f} of the first"
            )
            for length, seconds in time_steps(session, lengths, steps).items():
                typer.echo(f"{name}: a step behind {length:6d} tokens {seconds * 1e3:.2f} ms")


if __name__ == "__main__":
    typer.run(main)
