"""Where a compressed model loses quality: its reference is compiled, and :mod:`graphopt.quality` measures beside it."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from graphopt.artifact import artifact as artifacts
from graphopt.artifact.tokens import tokenizer_among, windows_of_text
from graphopt.compile.compilation import Compilation
from graphopt.errors import InputError
from graphopt.quality.losses import Losses, ProductLoss, losses_of, product_losses
from graphopt.quality.products import Pair
from graphopt.quality.texts import held_out_texts
from graphopt.tasks import TASKS
from graphopt.util.progress import Progress, silent

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from graphopt.tasks.ports import IntArray

TOKENS, WINDOW = 1024, 256
"""Tokens that errors are taken on, and tokens that are seen at once, by default."""


def losses(
    before: Path,
    after: Path,
    texts: Sequence[str] | None = None,
    *,
    tokens: int = TOKENS,
    window: int = WINDOW,
    restore: bool = True,
    weights: bool = False,
    on_stage: Progress = silent,
) -> Losses:
    """Measure where a compressed model loses quality.

    Args:
        before: what it was made from.
        after: an artifact of ``graphopt optimize``.
        texts: what both read; :func:`graphopt.quality.texts.held_out_texts` by default.
        tokens: how many of them.
        window: tokens that are seen at once.
        restore: whether to run both models with groups of products swapped as well: once for each role, and for groups
            of layers.
        weights: whether to count how weights lie among the levels of their formats.
        on_stage: called when a stage begins.

    Raises:
        InputError: AFTER has no recipe or no tokenizer, or a model cannot be run.
    """
    with _pair(before, after, on_stage) as pair:
        if not pair.products:
            raise InputError("no product of this model was found in the float model", file=after)
        windows = _windows(pair, texts, tokens, window)
        return losses_of(pair, windows, restore=restore, weights=weights, on_stage=on_stage)


def loss_of(
    before: Path,
    after: Path,
    node: str,
    texts: Sequence[str] | None = None,
    *,
    tokens: int = TOKENS,
    window: int = WINDOW,
    on_stage: Progress = silent,
) -> ProductLoss | None:
    """Return the errors of one product of a compressed model; ``None`` for a node that is no product.

    Args:
        before: what it was made from.
        after: an artifact of ``graphopt optimize``.
        node: the name of a node of it.
        texts: what both read; :func:`graphopt.quality.texts.held_out_texts` by default.
        tokens: how many of them.
        window: tokens that are seen at once.
        on_stage: called when a stage begins.

    Raises:
        InputError: AFTER has no recipe or no tokenizer, or a model cannot be run.
    """
    with _pair(before, after, on_stage) as pair:
        pair.products = [product for product in pair.products if product.name == node]
        if not pair.products:
            return None
        windows = _windows(pair, texts, tokens, window)
        on_stage("errors of the product")
        return next(product_losses(pair, windows))


@contextlib.contextmanager
def _pair(before: Path, after: Path, on_stage: Progress) -> Iterator[Pair]:
    """Give a model and what the exact steps of its recipe make of the model before, while files of both are there.

    Raises:
        InputError: there is no recipe, the model reads no text, or one of the steps cannot be run.
    """
    on_stage("running the exact steps of the recipe again")
    artifact = artifacts.read(after)
    if artifact.manifest.recipe is None:
        raise InputError(
            "there is no recipe in its manifest, so its losses cannot be located",
            file=after,
            remedy="give first what it was made from, then the folder that `graphopt optimize` wrote",
        )
    task = TASKS[artifact.manifest.task]
    if not task.reads_text:
        raise InputError(
            f"losses are located on text, and {task.noun} reads none",
            file=after,
            remedy="`graphopt search` finds which weights cost its outputs most, and leaves them in floats",
        )
    with tempfile.TemporaryDirectory(prefix="graphopt-") as folder:
        compilation = Compilation(before, artifact.manifest.recipe, work=Path(folder), on_stage=on_stage)
        compilation.apply_unchecked([step for step in compilation.passes if step.effect == "exact"])
        yield Pair(compilation.source, artifact, compilation.model, compilation.recipe, Path(folder))


def _windows(pair: Pair, texts: Sequence[str] | None, tokens: int, window: int) -> list[IntArray]:
    """Return windows of texts, int64 [length] each: about ``tokens`` of them all."""
    texts = held_out_texts() if texts is None else texts
    tokenizer = tokenizer_among(pair.after.companions)
    window = min(window, pair.after.manifest.model.max_positions or window)
    count = max(1, tokens // window // len(texts))
    return [ids for text in texts for ids in windows_of_text(tokenizer, text, window, count)]
