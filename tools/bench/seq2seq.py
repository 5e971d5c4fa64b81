"""Time a step of an encoder-decoder's decoder by the number of tokens before it, and its encoder.

    python tools/bench/seq2seq.py                                # T5-small and Whisper-base in shape, random weights
    python tools/bench/seq2seq.py t5 --recipe int8 --source 512 --rounds 31

Decoders of one session read the same source; each has another number of tokens, and they take steps in turn, always
from the same state. Times are the least processor times of one thread. `us a token` is how much longer a step takes for
each token before it, and `GB/s` the bytes of a token's keys and values over that time: a step that does nothing but
read its cache reaches the bandwidth of memory. The keys and values of the source are bound once: `moved` counts those
that are outputs of the decoder, which must be none.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

# Run as a script, Python looks for modules in tools/ only.
sys.path.insert(0, str(Path(__file__).parents[2]))
import graphopt
from graphopt.analysis.structure.ports import is_cross_port
from graphopt.inference.seq2seq import Seq2SeqSession, SourceDecoder
from tools.bench.parts.machine import OtherLoad, describe

LENGTHS = (1, 64, 128, 256, 440)


def write_checkpoint(kind: str, layers: int, folder: Path) -> None:
    """Write a checkpoint of random weights in the shape of T5-small or of Whisper-base, which have six layers."""
    import torch
    import transformers

    torch.manual_seed(0)
    if kind == "t5":
        settings: dict[str, Any] = {"vocab_size": 32128, "num_layers": layers, "decoder_start_token_id": 0}
        transformers.T5ForConditionalGeneration(transformers.T5Config(**settings)).save_pretrained(folder)
        return
    settings = {"d_model": 512, "encoder_layers": layers, "decoder_layers": layers, "encoder_attention_heads": 8}
    settings |= {"decoder_attention_heads": 8, "encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048}
    transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**settings)).save_pretrained(folder)


def source_of(session: Seq2SeqSession, tokens: int) -> tuple[dict[str, Any], float]:
    """Return the decoder's inputs from a random source, and the processor time of the encoder in seconds."""
    random = np.random.default_rng(0)
    start = time.process_time()
    if session.reads_recordings:
        features = random.standard_normal((1, 80, 3000)).astype(np.float32)
        source = session.source_of_recordings(features)
    else:
        ids = random.integers(1, 32000, (1, tokens))
        source = session.source_of_texts(ids, np.ones_like(ids))
    return source, time.process_time() - start


def bench(kind: str, layers: int, recipe: str, tokens: int, rounds: int, folder: Path) -> None:
    """Print the rows of a model."""
    write_checkpoint(kind, layers, folder / "checkpoint")
    graphopt.export(folder / "checkpoint", folder / "float32")
    model = folder / "float32"
    if recipe != "float32":
        model = folder / recipe
        graphopt.optimize(folder / "float32", recipe, model, target="ort-cpu", quality_tokens=0)
    session = graphopt.load_seq2seq(model, threads=1)
    source, seconds = source_of(session, tokens)
    moved_count = sum(is_cross_port(port.name) for port in session.decoder.inference.get_outputs())
    bound = sum(value.numpy().nbytes for name, value in source.items() if is_cross_port(name))
    print(
        f"{kind}, {recipe}: encoder {seconds * 1e3:.0f} ms, source {bound / 1e6:.1f} MB, moved {moved_count}",
        flush=True,
    )
    decoders = {length: SourceDecoder(session.decoder, source, 1) for length in LENGTHS}
    for length, decoder in decoders.items():
        decoder.step(np.ones((1, length), np.int64))
    samples: dict[int, list[float]] = {length: [] for length in LENGTHS}
    for _ in range(rounds):
        for length, decoder in decoders.items():
            start = time.process_time()
            decoder.step(np.ones((1, 1), np.int64))
            samples[length].append(time.process_time() - start)
            decoder.rewind(length)
    fastest = {length: min(times) * 1e6 for length, times in samples.items()}
    bytes_of_token = decoders[LENGTHS[-1]].states.bytes / LENGTHS[-1]
    for length, microseconds in fastest.items():
        print(f"  {length:4} tokens before: {microseconds:7.0f} us")
    slope = float(np.polyfit(list(fastest), list(fastest.values()), 1)[0])
    speed = bytes_of_token / slope / 1e3
    print(f"  {slope:.2f} us a token, {bytes_of_token / 1e3:.1f} kB a token, {speed:.1f} GB/s", flush=True)


def main(
    kinds: Annotated[str, typer.Argument(help="t5, whisper, with a comma between")] = "t5,whisper",
    layers: Annotated[int, typer.Option(help="of the encoder, and of the decoder")] = 6,
    recipe: Annotated[str, typer.Option(help="a preset, or float32")] = "float32",
    source: Annotated[int, typer.Option(help="tokens of a text to read")] = 256,
    rounds: Annotated[int, typer.Option()] = 21,
) -> None:
    """Time models one after the other."""
    load = OtherLoad()
    for kind in kinds.split(","):
        with tempfile.TemporaryDirectory() as folder:
            bench(kind, layers, recipe, source, rounds, Path(folder))
    print(f"{describe()}; others took {load.share():.0%} of the cores")


if __name__ == "__main__":
    typer.run(main)
