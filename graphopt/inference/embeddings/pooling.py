"""How the hidden states of a text become its embedding: the six ways of sentence-transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, assert_never

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphopt.artifact.hf_config import Pooling

Floats = npt.NDArray[np.float32]


def pool(hidden: Floats, mask: npt.NDArray[np.bool_], ways: Sequence[Pooling]) -> Floats:
    """Return one embedding for each text, [texts, width x ways]; the ways stand side by side.

    Args:
        hidden: hidden states [texts, length, width].
        mask: [texts, length], which columns are tokens; each row has one at least.
        ways: how; none means "mean".
    """
    return np.concatenate([_pool(hidden, mask, way) for way in ways or ("mean",)], axis=-1).astype(np.float32)


def _pool(hidden: Floats, mask: npt.NDArray[np.bool_], way: Pooling) -> npt.NDArray[Any]:
    """Return the embeddings [texts, width].

    With h_i the hidden states of the n tokens of a text: "mean" is the sum of h_i over n, "mean_sqrt_len_tokens" over
    the root of n, "weightedmean" the sum of i h_i over that of i, from 1 (SGPT, Muennighoff 2022), "max" the largest of
    each channel, "cls" and "lasttoken" the first and the last state.
    """
    rows, weights = np.arange(len(mask)), mask.astype(np.float64)
    embeddings: npt.NDArray[Any]
    match way:
        case "mean" | "mean_sqrt_len_tokens":
            counts = weights.sum(axis=1, keepdims=True)
            embeddings = _sum(hidden, weights) / (counts if way == "mean" else np.sqrt(counts))
        case "weightedmean":
            weights *= np.arange(1, mask.shape[1] + 1)
            embeddings = _sum(hidden, weights) / weights.sum(axis=1, keepdims=True)
        case "max":
            embeddings = np.where(mask[..., None], hidden, -np.inf).max(axis=1)
        case "cls":
            embeddings = hidden[rows, mask.argmax(axis=1)]
        case "lasttoken":
            embeddings = hidden[rows, mask.shape[1] - 1 - mask[:, ::-1].argmax(axis=1)]
        case _:
            assert_never(way)
    return embeddings


def _sum(hidden: Floats, weights: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    total: npt.NDArray[np.float64] = np.einsum("tlw,tl->tw", hidden.astype(np.float64), weights)
    return total
