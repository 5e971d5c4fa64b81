"""Measure the loss of a real model by its cache alone over a long text: KL of the next token from a float cache.

    python tools/studies/cache_quality.py                               # SmolLM2, 8192 tokens; `make real` fetches it
    python tools/studies/cache_quality.py --kernels --only int6 --only 'int2*'       # graphopt's storages by kernels
    python tools/studies/cache_quality.py --only 'int*' --tokens 2048               # some methods, a shorter text
    python tools/studies/cache_quality.py --recipe recipe.yaml                      # what graphopt search-cache wrote

All weights are floats; the text is the documentation of the Python language. By default methods are *emulated*: numbers
are rounded in PyTorch as a cache would round them (tools/studies/caches), so that methods of papers and of llama.cpp,
for which graphopt has no kernels, can be compared with its own. All but the last tokens of the text are read with a
float cache; the last ones are then fed again under each method, as if one by one, and read the whole rounded cache.
llama.cpp rotates heads and rounds every token at once, and so does its emulation; its CPU kernels also round queries to
8 bits, which is left out, in its favour.

``--kernels``, and ``--recipe`` with recipes, feed the whole text to the artifacts themselves, page by page, so that
rounded tokens also change later ones.
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
from tools.bench.parts.options import JsonFile, is_selected
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
"""Storages of ``--kernels``: one for keys and values, or one for keys and one for values."""


@dataclass(frozen=True)
class Row:
    """The loss by one cache.

    Attributes:
        name: of the method.
        how: emulated, or by kernels.
        bits: of a code, on average, without scales; 32 for floats.
        kl_mean: nats.
        kl_tail: the 99.9th percentile of the KL.
        perplexity: of the scored tokens.
        same: share of tokens whose first choice stays.
        seconds: of the measurement.
    """

    name: str
    how: str
    bits: float
    kl_mean: float
    kl_tail: float
    perplexity: float
    same: float
    seconds: float


def row(name: str, kind: str, bits: float, reference: Tensor, logs: Tensor, ids: Tensor, begin: float) -> Row:
    """Compare log probabilities [scored tokens, vocabulary] after the last tokens of ``ids``."""
    kl = (reference.exp() * (reference - logs)).sum(-1)
    nats = -logs[:-1].gather(-1, ids[-len(logs) + 1 :, None])
    same_share = (reference.argmax(-1) == logs.argmax(-1)).float().mean()
    perplexity, seconds = float(nats.mean().exp()), time.perf_counter() - begin
    return Row(name, kind, bits, float(kl.mean()), float(kl.quantile(0.999)), perplexity, float(same_share), seconds)


def python_documentation() -> str:
    """Return the documentation of the Python language that ``help()`` shows, topic by topic."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def library_sources() -> str:
    """Return some modules of Python's library: bases are calibrated on them, and measured on another text."""
    return "\n\n".join(inspect.getsource(module) for module in (argparse, inspect, typing))


def by_kernels(session: graphopt.Session, ids: Tensor, scored_tokens: int) -> Tensor:
    """Feed a text page by page; return the log probabilities after each of its last tokens."""
    decoder, pieces = Decoder(session, 1), []
    for begin in range(0, len(ids), PAGE):
        logits = decoder.step(ids[None, begin : begin + PAGE].numpy().astype(np.int64))
        if begin + PAGE > len(ids) - scored_tokens:
            pieces.append(torch.log_softmax(torch.from_numpy(np.array(logits[0], np.float32)), -1))
    return torch.cat(pieces)[-scored_tokens:]


def kernel_rows(
    checkpoint: Path, ids: Tensor, scored_tokens: int, only: list[str] | None, recipes: Sequence[Path] = ()
) -> list[Row]:
    """Return a row for each recipe; by default those of :func:`storage_recipes`."""
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary) / "float32"
        graphopt.export(checkpoint, source)
        candidates = [load_recipe(file) for file in recipes] or [
            recipe for recipe in storage_recipes() if is_selected(recipe.name, only)
        ]
        reference = None
        for recipe in (_FLOATS, *candidates):
            begin = time.perf_counter()
            target = Path(temporary) / "compressed"
            graphopt.optimize(source, recipe, target, run="parts", quality_tokens=0, overwrite=True)
            session = graphopt.load(target)
            log_probabilities = by_kernels(session, ids, scored_tokens)
            reference = log_probabilities if reference is None else reference
            bits = float(np.mean([_bits(layer) for layer in session.interface.layers]))
            rows.append(row(recipe.name, "kernels", bits, reference, log_probabilities, ids, begin))
            print(rows[-1], flush=True)
    return rows


def storage_recipes() -> list[Recipe]:
    """Return a recipe for each storage: plain, rotated, and rotated with keys rounded for queries of another text."""
    recipes = []
    for rotates, feedback in ((False, False), (True, False), (True, True)):
        before: list[Step] = [Canonicalize()]
        if rotates:
            before += [FoldNorms(), Rotate(query_key="hadamard")]
        for storage, *of_values in STORAGES:
            name = " keys, ".join([storage, *(f"{values} values" for values in of_values)])
            name += (", rotated" if rotates else "") + (", feedback" if feedback else "")
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
    scored_tokens: Annotated[int, typer.Option("--scored", min=64, help="the last of them, whose KL is taken")] = 1024,
    only: Annotated[list[str] | None, typer.Option(help="names of methods, with * for anything")] = None,
    kernels: Annotated[bool, typer.Option(help="run artifacts instead of emulating")] = False,
    recipes: Annotated[
        list[Path] | None,
        typer.Option("--recipe", help="run artifacts of these recipes instead, such as one of search-cache"),
    ] = None,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    json_file: JsonFile = None,
) -> None:
    """Read the text, round the cache by each method, print the loss."""
    torch.set_num_threads(threads)
    checkpoint = fetch(model) if model == "smollm2" else Path(model)
    source = {"gguf_file": checkpoint.name} if checkpoint.suffix == ".gguf" else {}
    tokenizer = AutoTokenizer.from_pretrained(str(checkpoint.parent if source else checkpoint), **source)
    words = python_documentation() if text is None else text.read_text(encoding="utf-8")
    ids = torch.tensor(tokenizer(words)["input_ids"][:tokens])
    if len(ids) < tokens:
        raise typer.BadParameter(f"the text has {len(ids)} tokens, not {tokens}")
    if kernels or recipes:
        rows = kernel_rows(checkpoint, ids, scored_tokens, only, recipes or [])
    else:
        rounded_model, rows = RoundedModel(checkpoint, ids, scored_tokens), []
        all_methods: list[Method | SpectralMethod | WithFeedback] = [*methods()]
        if not only or any(pattern.startswith(("spectral", "feedback", "*")) for pattern in only):
            calibration_ids = torch.tensor(tokenizer(library_sources())["input_ids"][:tokens])
            statistics = rounded_model.statistics(calibration_ids)
            all_methods += [*feedback_methods(statistics, TAIL), *of_text(statistics, TAIL)]
        for method in all_methods:
            if is_selected(method.name, only):
                begin = time.perf_counter()
                logs = rounded_model.log_probabilities(method)
                rows.append(row(method.name, "emulated", method.bits, rounded_model.reference, logs, ids, begin))
                print(rows[-1], flush=True)
                if json_file is not None:
                    json_file.write_text(json.dumps([asdict(entry) for entry in rows], indent=2) + "\n")
    table = Table("cache", "bits", "KL, mean", "KL, 99.9%", "perplexity", "same choice", "seconds")
    for entry in rows:
        figures = (f"{entry.kl_mean:.5f}", f"{entry.kl_tail:.4f}", f"{entry.perplexity:.3f}", f"{entry.same:.1%}")
        table.add_row(entry.name, f"{entry.bits:.2f}", *figures, f"{entry.seconds:.0f}")
    Console().print(table)
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(entry) for entry in rows], indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
