"""Eviction: caches in pages that keep as many tokens as a budget says, those that a score of their keys likes best.

    before:  tokens 0 .. n - 1 of a row, in ceil(n / T) pages
    after:   the first ``sinks``, the newest ``recent`` and, per layer and KV head, the best of the others, in their
             order, in ceil(keep / T) pages; the memory of the others is given back

Keys hold their positions (a rotary embedding turned them), so attention over the tokens that stay is what it was
without the others, whatever place they have in a page. New tokens get the positions that they would have had, from
``position_ids``. Storages of integers round what they keep once more, but for the pages that they hold as floats.

Scores need no queries, so a graph that is in use already can evict, and a decoder can at any time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from graphopt.errors import InputError
from graphopt.runtime_ops.kv_attention.spec.layout import (
    clip_of_rounded,
    factors_of_tokens,
    pack_keys,
    pack_values,
    round_page,
)
from graphopt.runtime_ops.kv_attention.spec.readings import stored_positions, stored_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from graphopt.analysis.structure.paged_caches import PagedLayer
    from graphopt.runtime_ops.kv_attention.spec.attributes import KVAttributes

Array = npt.NDArray[Any]
Singles = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]


def unlike_the_mean(keys: Singles, values: Singles) -> Singles:
    """Score tokens by how little their keys point where those of the head do on average (KeyDiff, Park et al. 2025).

    Args:
        keys: float32 [Hk, n, D].
        values: float32 [Hk, n, D].
    """
    del values
    directions = keys / np.maximum(np.linalg.norm(keys, axis=-1, keepdims=True), 1e-12)
    mean = directions.mean(axis=1, keepdims=True)
    scores: Singles = -(directions * mean).sum(axis=-1)
    return scores


def short_keys(keys: Singles, values: Singles) -> Singles:
    """Score tokens by how short their keys are (Devoto et al. 2024); arguments as of :func:`unlike_the_mean`."""
    del values
    scores: Singles = -np.linalg.norm(keys, axis=-1)
    return scores


SCORES: dict[str, Callable[[Singles, Singles], Singles]] = {"keydiff": unlike_the_mean, "key-norm": short_keys}
"""What the tokens that stay are chosen by: keys and values, float32 [Hk, n, D] each, to scores [Hk, n]."""


@dataclass(frozen=True)
class Eviction:
    """How many tokens a cache keeps, and which.

    Attributes:
        keep: tokens of a row, at most.
        score: one of ``SCORES``.
        sinks: first tokens that always stay.
        recent: newest tokens that always stay.
        slack: tokens beyond ``keep`` that may come before the next ones go.

    Raises:
        InputError: a number is too small, or the score is not known.
    """

    keep: int
    score: str = "keydiff"
    sinks: int = 64
    recent: int = 256
    slack: int = 256

    def __post_init__(self) -> None:
        if self.score not in SCORES:
            raise InputError(f"there is no score {self.score!r}", remedy=f"choose one of {', '.join(SCORES)}")
        if min(self.sinks, self.slack) < 0 or self.recent < 1 or self.keep < self.sinks + self.recent:
            raise InputError(
                f"a cache that keeps {self.keep} tokens has no room for the {self.sinks} first and the {self.recent} "
                "newest",
                remedy=f"keep {self.sinks + self.recent} or more",
            )

    def tokens_that_stay(self, keys: Singles, values: Singles) -> Integers:
        """Return the tokens that each head keeps, in order, int64 [Hk, keep]; arguments as of ``SCORES``."""
        count = keys.shape[1]
        scores = SCORES[self.score](keys, values).astype(np.float64)
        scores[:, : self.sinks] = scores[:, count - self.recent :] = np.inf
        order = np.argsort(-scores, axis=-1, kind="stable")
        return np.sort(order[:, : self.keep], axis=-1)


def check_layers(layers: Sequence[PagedLayer]) -> None:
    """Refuse caches that cannot lose tokens in their middle.

    Raises:
        InputError: a layer knows its tokens by their places.
    """
    for layer in layers:
        kv = layer.attributes
        reasons = {
            "it drops tokens by itself": kv.may_drop or kv.window > 0,
            "its pages have summaries": kv.summarizes,
            "its rows are latents": kv.value_size > 0,
            "its scores have a bias by distance": bool(kv.slopes),
            "some of its heads stream": any(policy.may_drop for policy in kv.policies_in_use),
        }
        for reason, holds in reasons.items():
            if holds:
                raise InputError(
                    f"the cache of layer {layer.number} evicts no tokens: {reason}",
                    remedy="make the model with dense heads, or with sparse_prefill",
                )


def evict(
    layer: PagedLayer, state: Mapping[str, Array], tokens: Integers, eviction: Eviction, pages: int
) -> dict[str, Array]:
    """Return the state of a layer that has only the tokens that stay.

    Args:
        layer: of the graph.
        state: keys, values, scales and recent of all rows, as far as the layer has them.
        tokens: of each row, int64 [batch].
        eviction: what stays; rows that have no more than that keep all.
        pages: that the state has then.
    """
    kv, size = layer.attributes, layer.head_size
    rows = []
    for row, count in enumerate(tokens.tolist()):
        of_row = {name: array[row] for name, array in state.items()}
        positions = stored_positions(kv, count, of_row["keys"].shape[1])
        heads = [stored_tokens(kv, of_row, head, positions, count, size) for head in range(kv.kv_heads)]
        keys, values = (
            np.stack([part.numbers for part in parts]).astype(np.float32) for parts in zip(*heads, strict=True)
        )
        if count > eviction.keep:
            index = eviction.tokens_that_stay(keys, values)[..., np.newaxis]
            keys, values = (np.take_along_axis(numbers, index, axis=1) for numbers in (keys, values))
        rows.append(paged_state(kv, keys, values, pages))
    return {name: np.stack([row_state[name] for row_state in rows]) for name in state}


def paged_state(kv: KVAttributes, keys: Singles, values: Singles, pages: int) -> dict[str, Array]:
    """Return what a row has of each state of keys and values [Hk, n, D], rounded before, that follow one another."""
    heads, count, size = keys.shape
    shape = (heads, pages, kv.page, size)
    token_rows = np.zeros((2, heads, pages * kv.page, size), np.float32)
    token_rows[0, :, :count], token_rows[1, :, :count] = keys, values
    key_pages, value_pages = (numbers.reshape(shape) for numbers in token_rows)
    if kv.levels is None or kv.value_levels is None:
        return {"keys": pack_keys(key_pages, kv.storage), "values": pack_values(value_pages, kv.storage)}
    recent = np.zeros((heads, kv.slots, 2, kv.page, size), np.float32)
    for page in range(max(1, -(-count // kv.page))):
        if kv.is_recent(page, count):
            recent[:, int(kv.slot(page))] = np.stack([key_pages[:, page], value_pages[:, page]], axis=1)
    factors = factors_of_tokens(key_pages) if kv.token_factors else np.ones((1, 1, 1, 1), np.float32)
    key_codes, *key_scales = round_page(key_pages / factors, -2, kv.levels, clip_of_rounded(kv.clip))
    value_codes, *value_scales = round_page(value_pages, -1, kv.value_levels)  # the codes that they had
    of_tokens = [factors.squeeze(-1)] if kv.token_factors else []
    return {
        "keys": pack_keys(key_codes, kv.storage),
        "values": pack_values(value_codes, kv.stored_values.name),
        "scales": np.concatenate([*key_scales, *value_scales, *of_tokens], axis=-1),
        "recent": recent.reshape(heads, kv.slots, -1),
    }
