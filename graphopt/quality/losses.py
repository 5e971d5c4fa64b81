"""Where quality was lost, and what to do about it: errors of each product, and what groups of them do to the whole.

What no group explains is said, too: token embedding, caches, activations, and errors that do not add up.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from graphopt.artifact.tokens import tokenizer_among, windows_of_text
from graphopt.errors import InputError
from graphopt.graph.diagnostics import Fact
from graphopt.passes.recipe import Recipe
from graphopt.quality.advice import advice, quantizes, sparing, worth
from graphopt.quality.groups import Group, Measuring, Remainder, remainder_of
from graphopt.quality.levels import Histogram, histogram
from graphopt.quality.product_sessions import sessions
from graphopt.quality.products import Pair
from graphopt.quality.spread import Spread
from graphopt.quality.texts import held_out_texts
from graphopt.util.progress import Progress, silent

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import onnx_ir as ir

    from graphopt.tasks.ports import IntArray

TOKENS, WINDOW = 1024, 256
"""Tokens that errors are taken on, and tokens that are seen at once, by default."""


class ProductLoss(BaseModel):
    """How far one product is off, relative to what it makes in floats (root of the mean squares).

    Attributes:
        node: its name.
        role: what it is for.
        layer: where.
        local: with inputs of the reference.
        accumulated: inside the model; ``None`` for an expert that was given other tokens there.
        first_token: the same for the first token of each window, which is not counted in the others: it is often huge.
        bytes: of its weights.
        read_before: how far its inputs spread in BEFORE; ``None`` where it is not there under this name.
        read: the same in the reference, where the recipe's rotations have been at them.
    """

    model_config = ConfigDict(extra="forbid")

    node: str
    role: str
    layer: int | None
    local: float
    accumulated: float | None
    first_token: float | None
    bytes: int
    read_before: Spread | None = None
    read: Spread | None = None


class Losses(BaseModel):
    """Where quality was lost.

    Attributes:
        tokens: how many were read.
        kl: divergence of the model from its reference, in nats per token; ``None`` for one that makes no text.
        products: in the order of the graph.
        groups: what groups of them do to the divergence.
        remainder: what of the divergence no single group explains.
        unmatched: products without a partner in the reference.
        advice: what the figures support, the most first.
        remedy: the group that is worth the most for its bytes in floats, where a tenth of the divergence comes back.
        recipe: the recipe of the model with that in floats; ``None`` where no step ``quantize_weights`` rounds it.
        histograms: of the product of each role that errs most by itself, where they were asked for.
    """

    model_config = ConfigDict(extra="forbid")

    tokens: int
    kl: float | None = None
    products: list[ProductLoss] = []
    groups: list[Group] = []
    remainder: Remainder | None = None
    unmatched: list[str] = []
    advice: list[Fact] = []
    remedy: Group | None = None
    recipe: Recipe | None = None
    histograms: list[Histogram] = []


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
    with tempfile.TemporaryDirectory(prefix="graphopt-") as folder:
        on_stage("running the exact steps of the recipe again")
        pair = Pair(before, after, Path(folder))
        if not pair.products:
            raise InputError("no product of this model was found in the float model", file=after)
        read = _windows(pair, held_out_texts() if texts is None else texts, tokens, window)
        return _measured(pair, read, restore, weights, on_stage)


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
    with tempfile.TemporaryDirectory(prefix="graphopt-") as folder:
        on_stage("running the exact steps of the recipe again")
        pair = Pair(before, after, Path(folder))
        pair.products = [each for each in pair.products if each.name == node]
        if not pair.products:
            return None
        read = _windows(pair, held_out_texts() if texts is None else texts, tokens, window)
        on_stage("errors of the product")
        return next(_product_losses(pair, read))


def _product_losses(pair: Pair, read: Sequence[IntArray]) -> Iterator[ProductLoss]:
    for product, errors in pair.errors(read):
        yield ProductLoss(node=product.name, role=product.role, layer=product.layer, bytes=product.bytes, **errors)


def _measured(pair: Pair, read: Sequence[IntArray], restore: bool, weights: bool, on_stage: Progress) -> Losses:
    found = Losses(tokens=sum(map(len, read)), unmatched=pair.unmatched)
    for number, product in enumerate(_product_losses(pair, read)):
        on_stage("errors of products", number, len(pair.products))
        found.products.append(product)
    if restore and pair.after.manifest.task == "causal_lm" and not _last_only(pair.after.model):
        with sessions(pair.folder) as opened:
            measuring = Measuring(pair, read, opened, on_stage)
            found.kl, found.groups = measuring.total, list(measuring.groups())
        found.remainder = remainder_of(found.kl, found.groups)
    found.advice = list(advice(found, pair.recipe))
    found.remedy = next(iter(worth(found)), None)
    if found.remedy is not None and found.remedy.matrices and quantizes(pair.recipe):
        found.recipe = sparing(pair.recipe, found.remedy.matrices)
    if weights:
        found.histograms = list(_histograms(pair, found.products))
    return found


def _histograms(pair: Pair, errors: Sequence[ProductLoss]) -> Iterator[Histogram]:
    """Yield the histogram of the product of each role that errs most by itself."""
    nodes = {node.name: node for node in pair.after.model.graph}
    products = {each.name: each for each in pair.products}
    for role in dict.fromkeys(each.role for each in errors):
        worst = max((each for each in errors if each.role == role), key=lambda each: each.local)
        found = histogram(products[worst.node], nodes[worst.node])
        if found is not None:
            yield found


def _windows(pair: Pair, texts: Sequence[str], tokens: int, window: int) -> list[IntArray]:
    tokenizer = tokenizer_among(pair.after.companions)
    positions = pair.after.manifest.model.max_positions
    window = min(window, positions or window)
    each = max(1, tokens // window // len(texts))
    return [ids for text in texts for ids in windows_of_text(tokenizer, text, window, each)]


def _last_only(model: ir.Model) -> bool:
    logits = next((value for value in model.graph.outputs if value.name == "logits"), None)
    return logits is None or (logits.shape is not None and len(logits.shape) > 1 and logits.shape[1] == 1)
