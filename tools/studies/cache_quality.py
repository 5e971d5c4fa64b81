"""Measure what a cache alone costs a real model at length: KL of the next token beside a float cache.

    python tools/studies/cache_quality.py                               # SmolLM2, 8192 tokens; `make real` fetches it
    python tools/studies/cache_quality.py --kernels --only int6 --only 'int2*'       # graphopt's storages by kernels
    python tools/studies/cache_quality.py --only 'int*' --tokens 2048               # some methods, a shorter text
    python tools/studies/cache_quality.py --recipe recipe.yaml                      # what graphopt search-cache wrote

All weights are floats; the text is the documentation of its language that comes with Python. By default methods are
*emulated*: numbers are rounded in PyTorch as a cache would round them (tools/studies/caches), so that methods of papers
and of llama.cpp, of which graphopt has no kernels, stand beside its own. The text but its last tokens is read with
floats; the last ones are then fed again under each method, as if one by one, and read the whole cache rounded.
llama.cpp rotates heads and rounds every token at once, and so does its emulation; that its CPU also rounds queries to
8 bits is left out, in its favour.

``--kernels``, and ``--recipe`` for others, feed the whole text to the artifacts themselves, page by page, so that what
was rounded also changes what comes later.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import tempfile
import time
import typing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

# Run as a script, Python looks for modules in tools/ only.
sys.path.insert(0, str(Path(__file__).parents[2]))
import graphopt
from graphopt.inference.decoding.decoder import Decoder
from graphopt.passes.algebra.fold_norms.fold_norms import FoldNorms
from graphopt.passes.algebra.rotate.rotate import Rotate
from graphopt.passes.cache.page_kv import PageKV
from graphopt.passes.cache.quantize_kv import QuantizeKV
from graphopt.passes.lift.canonicalize import Canonicalize
from graphopt.passes.recipe import Recipe, Step, load_recipe
from graphopt.runtime_ops.kv_attention.spec.storages import STORAGE_OF
from tools.bench.parts.options import JsonFile, is_asked
from tools.studies.caches.attention import RoundedModel
from tools.studies.caches.feedback import WithFeedback, feedback_methods
from tools.studies.caches.methods import TAIL, methods
from tools.studies.caches.rounding import Method, Tensor
from tools.studies.caches.spectral import SpectralMethod, of_text
from tools.studies.real.models import fetch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphopt.analysis.structure.paged_caches import PagedLayer

PAGE = 64

_FLOATS = Recipe(name="float32", steps=(Canonicalize(), PageKV()))

STORAGES = (("int8",), ("int8", "int6"), ("int6",), ("int4",), ("int4", "int3"), ("int3",), ("int2",))
"""That ``--kernels`` takes: of keys and values, or of keys and of values."""


@dataclass(frozen=True)
class Row:
    """What one cache costs.

    Attributes:
        name: of the method.
        how: emulated, or by kernels.
        bits: of a code, on average, without scales; 32 for floats.
        kl_mean: nats.
        kl_tail: the KL that one of a thousand tokens exceeds.
        perplexity: of the scored tokens.
        same: share of tokens whose first choice stays.
        seconds: that it took.
    """

    name: str
    how: str
    bits: float
    kl_mean: float
    kl_tail: float
    perplexity: float
    same: float
    seconds: float


def row(name: str, how: str, bits: float, reference: Tensor, found: Tensor, ids: Tensor, began: float) -> Row:
    """Compare logarithms of probabilities [scored, vocabulary] behind the last tokens of ``ids``."""
    kl = (reference.exp() * (reference - found)).sum(-1)
    nats = -found[:-1].gather(-1, ids[-len(found) + 1 :, None])
    same = (reference.argmax(-1) == found.argmax(-1)).float().mean()
    perplexity, seconds = float(nats.mean().exp()), time.perf_counter() - began
    return Row(name, how, bits, float(kl.mean()), float(kl.quantile(0.999)), perplexity, float(same), seconds)


def python_documentation() -> str:
    """Return the documentation of Python's language that ``help()`` shows, topic by topic."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def library_sources() -> str:
    """Return some modules of Python's library: what bases are calibrated on, unlike the text that is measured."""
    return "\n\n".join(inspect.getsource(module) for module in (argparse, inspect, typing))


def by_kernels(session: graphopt.Session, ids: Tensor, scored: int) -> Tensor:
    """Feed a text page by page; return logarithms of probabilities behind its last tokens."""
    decoder, pieces = Decoder(session, 1), []
    for begin in range(0, len(ids), PAGE):
        logits = decoder.step(ids[None, begin : begin + PAGE].numpy().astype(np.int64))
        if begin + PAGE > len(ids) - scored:
            pieces.append(torch.log_softmax(torch.from_numpy(np.array(logits[0], np.float32)), -1))
    return torch.cat(pieces)[-scored:]


def kernel_rows(
    checkpoint: Path, ids: Tensor, scored: int, only: list[str] | None, recipes: Sequence[Path] = ()
) -> list[Row]:
    """Return a row for each recipe; by default those of :func:`storage_recipes`."""
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary) / "float32"
        graphopt.export(checkpoint, source)
        candidates = [load_recipe(file) for file in recipes] or [
            recipe for recipe in storage_recipes() if is_asked(recipe.name, only)
        ]
        reference = None
        for recipe in (_FLOATS, *candidates):
            began = time.perf_counter()
            compressed = Path(temporary) / "compressed"
            graphopt.optimize(source, recipe, compressed, run="parts", quality_tokens=0, overwrite=True)
            session = graphopt.load(compressed)
            log_probabilities = by_kernels(session, ids, scored)
            reference = log_probabilities if reference is None else reference
            bits = float(np.mean([_bits(layer) for layer in session.interface.layers]))
            rows.append(row(recipe.name, "kernels", bits, reference, log_probabilities, ids, began))
            print(rows[-1], flush=True)
    return rows


def storage_recipes() -> list[Recipe]:
    """Return a recipe for each storage, as it is and rotated, and with keys rounded for queries of another text."""
    recipes = []
    for rotated, feedback in ((False, False), (True, False), (True, True)):
        before: list[Step] = [Canonicalize()]
        if rotated:
            before += [FoldNorms(), Rotate(query_key="hadamard")]
        for storage, *of_values in STORAGES:
            name = " keys, ".join([storage, *(f"{values} values" for values in of_values)])
            name += (", rotated" if rotated else "") + (", feedback" if feedback else "")
            values = of_values[0] if of_values else None
            last = QuantizeKV(storage=storage, value_storage=values, key_feedback=feedback)
            recipes.append(Recipe(name=name, steps=(*before, last)))
    return recipes


def _bits(layer: PagedLayer) -> float:
    """Return the bits of a code of a layer, on average."""
    kv = layer.attributes
    return (STORAGE_OF[kv.storage].bits + STORAGE_OF[kv.value_storage or kv.storage].bits) / 2


def main(
    model: Annotated[str, typer.Option(help="smollm2, a .gguf file, or a Hugging Face folder")] = "smollm2",
    text: Annotated[Path | None, typer.Option(help="a file instead of Python's documentation")] = None,
    tokens: Annotated[int, typer.Option(min=256, help="of the text")] = 8192,
    scored: Annotated[int, typer.Option(min=64, help="the last of them, whose KL is taken")] = 1024,
    only: Annotated[list[str] | None, typer.Option(help="names of methods, with * for anything")] = None,
    kernels: Annotated[bool, typer.Option(help="run artifacts instead of emulating")] = False,
    recipes: Annotated[
        list[Path] | None, typer.Option("--recipe", help="run what these make instead, such as search-cache wrote")
    ] = None,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    json_file: JsonFile = None,
) -> None:
    """Read the text, round the cache by each method, print what that costs."""
    torch.set_num_threads(threads)
    checkpoint = fetch(model) if model == "smollm2" else Path(model)
    source = {"gguf_file": checkpoint.name} if checkpoint.suffix == ".gguf" else {}
    tokenizer = AutoTokenizer.from_pretrained(str(checkpoint.parent if source else checkpoint), **source)
    words = python_documentation() if text is None else text.read_text(encoding="utf-8")
    ids = torch.tensor(tokenizer(words)["input_ids"][:tokens])
    if len(ids) < tokens:
        raise typer.BadParameter(f"the text has {len(ids)} tokens, not {tokens}")
    if kernels or recipes:
        rows = kernel_rows(checkpoint, ids, scored, only, recipes or [])
    else:
        rounded, rows = RoundedModel(checkpoint, ids, scored), []
        every: list[Method | SpectralMethod | WithFeedback] = [*methods()]
        if not only or any(pattern.startswith(("spectral", "feedback", "*")) for pattern in only):
            other = torch.tensor(tokenizer(library_sources())["input_ids"][:tokens])
            statistics = rounded.statistics(other)
            every += [*feedback_methods(statistics, TAIL), *of_text(statistics, TAIL)]
        for method in every:
            if is_asked(method.name, only):
                began = time.perf_counter()
                found = rounded.log_probabilities(method)
                rows.append(row(method.name, "emulated", method.bits, rounded.reference, found, ids, began))
                print(rows[-1], flush=True)
                if json_file is not None:
                    json_file.write_text(json.dumps([asdict(each) for each in rows], indent=2) + "\n")
    table = Table("cache", "bits", "KL, mean", "KL, 99.9%", "perplexity", "same choice", "seconds")
    for each in rows:
        figures = (f"{each.kl_mean:.5f}", f"{each.kl_tail:.4f}", f"{each.perplexity:.3f}", f"{each.same:.1%}")
        table.add_row(each.name, f"{each.bits:.2f}", *figures, f"{each.seconds:.0f}")
    Console().print(table)
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(each) for each in rows], indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
