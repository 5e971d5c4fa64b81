"""Eviction by graphopt itself: artifacts read a prompt by their kernels, then ``Decoder.evict`` keeps a part of it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import graphopt
from graphopt.analysis.structure.paged_caches import PagedLayer
from graphopt.inference.decoding.decoder import Decoder
from graphopt.inference.states.eviction import Eviction
from graphopt.passes.algebra.fold_norms.fold_norms import FoldNorms
from graphopt.passes.algebra.rotate.rotate import Rotate
from graphopt.passes.cache.quantize_kv import QuantizeKV
from graphopt.passes.lift.canonicalize import Canonicalize
from graphopt.passes.recipe import Recipe
from tools.bench.parts.options import is_selected
from tools.studies.caches.prompt import NEXT, RECENT, SINKS
from tools.studies.caches.rounding import Tensor

PAGE = 64

STORAGES: dict[str, tuple[str, str | None]] = {
    "float16": ("float16", None),
    "int6": ("int6", None),
    "int4": ("int4", None),
    "int4 keys, int3 values": ("int4", "int3"),
}
"""Storages of keys, and of values where they differ; heads are rotated before numbers become codes."""

KINDS = ("streaming", "keydiff", "key-norm")


@dataclass(frozen=True)
class Outcome:
    """The predictions after a prompt of which a part is kept.

    Attributes:
        name: of the method of eviction.
        bytes: of the kept part, as a share of float16 keys and values of the whole prompt.
        reference: log probabilities after each of the next tokens, with the whole prompt, [NEXT, vocabulary].
        logs: the same with the kept part.
    """

    name: str
    bytes: float
    reference: Tensor
    logs: Tensor


def bytes_of(layers: Sequence[PagedLayer], tokens: int) -> int:
    """Return the bytes of all states of a row of ``tokens``: pages, their scales, and slots of floats."""
    return sum(layer.bytes(1, -(-tokens // PAGE)) for layer in layers)


def tokens_in(layers: Sequence[PagedLayer], most_bytes: float, tokens: int) -> int:
    """Return how many of ``tokens`` the caches of a row hold in ``most_bytes``, in whole pages or all of them."""
    counts = [*range(PAGE, tokens, PAGE), tokens]
    return max((count for count in counts if bytes_of(layers, count) <= most_bytes), default=0)


def eviction(kind: str, keep: int) -> Eviction:
    """Return the eviction that keeps ``keep`` tokens: the first and the newest, or also those of the best scores."""
    if kind == "streaming":
        return Eviction(keep, sinks=SINKS, recent=keep - SINKS, slack=0)
    return Eviction(keep, kind, SINKS, RECENT, slack=0)


def read_pages(decoder: Decoder, ids: Tensor) -> Iterator[Tensor]:
    """Feed tokens page by page; yield the log probabilities after the tokens of each page, [tokens, vocabulary]."""
    for piece in ids.split(PAGE):
        logits = decoder.step(piece[None].numpy().astype(np.int64))[0]
        yield torch.log_softmax(torch.from_numpy(np.array(logits, np.float32)), -1)


def by_kernels(checkpoint: Path, ids: Tensor, share: float, only: Sequence[str]) -> Iterator[Outcome]:
    """Yield the outcome of each storage and eviction, all at the same bytes.

    Args:
        checkpoint: of the model.
        ids: of the prompt and ``NEXT`` tokens after it.
        share: of the bytes that float16 pages of the whole prompt take.
        only: patterns of storages and scores, see :func:`is_selected`.
    """
    prompt, following = ids[:-NEXT], ids[-NEXT:]
    full_bytes, reference = 0, torch.empty(0)
    with tempfile.TemporaryDirectory() as temporary:
        source, target = Path(temporary) / "float32", Path(temporary) / "compressed"
        graphopt.export(checkpoint, source)
        for storage, (key_storage, value_storage) in STORAGES.items():
            kinds = [kind for kind in KINDS if is_selected(f"{storage}, {kind}", only)]
            if not kinds and full_bytes:
                continue
            rotation = (FoldNorms(), Rotate(query_key="hadamard")) if full_bytes else ()
            last = QuantizeKV(storage=key_storage, value_storage=value_storage)
            recipe = Recipe(name="cache", steps=(Canonicalize(), *rotation, last))
            graphopt.optimize(source, recipe, target, run=False, overwrite=True)
            decoder = Decoder(graphopt.load(target), 1, room=len(ids))
            for _ in read_pages(decoder, prompt):
                pass
            layers = decoder.session.interface.layers
            if not full_bytes:
                full_bytes = bytes_of(layers, len(prompt))
                reference = torch.cat([*read_pages(decoder.fork([0]), following)])
            keep = tokens_in(layers, full_bytes * share, len(prompt))
            for kind in kinds if keep < len(prompt) else kinds[:1]:
                fork, name = decoder.fork([0]), f"{storage}, all tokens"
                if keep < len(prompt):
                    fork.evict(eviction(kind, keep))
                    name = f"{storage}, {keep / len(prompt):.0%} of the tokens by {kind}"
                logs = torch.cat([*read_pages(fork, following)])
                yield Outcome(name, bytes_of(layers, keep) / full_bytes, reference, logs)
