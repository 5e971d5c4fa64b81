"""Where quality was lost, and what to do about it: errors of each product, and what groups of them do to the whole.

What no group explains is said, too: token embedding, caches, activations, and errors that do not add up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from graphopt.graph.diagnostics import Fact
from graphopt.passes.recipe import Recipe
from graphopt.quality.advice import advice, quantizes, sparing, worth
from graphopt.quality.groups import Group, Measuring, Remainder, remainder_of
from graphopt.quality.levels import Histogram, histogram
from graphopt.quality.product_sessions import sessions
from graphopt.quality.spread import Spread
from graphopt.tasks import TASKS
from graphopt.util.progress import Progress, silent

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import onnx_ir as ir

    from graphopt.quality.products import Pair
    from graphopt.tasks.ports import IntArray


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


def losses_of(
    pair: Pair, texts: Sequence[IntArray], *, restore: bool = True, weights: bool = False, on_stage: Progress = silent
) -> Losses:
    """Measure where a compressed model loses quality.

    Args:
        pair: the model and its reference.
        texts: what both read, int64 [length] each.
        restore: whether to run both models with groups of products swapped as well: once for each role, and for groups
            of layers.
        weights: whether to count how weights lie among the levels of their formats.
        on_stage: called when a stage begins.

    Raises:
        InputError: a model cannot be run.
    """
    losses = Losses(tokens=sum(map(len, texts)), unmatched=pair.unmatched)
    for number, product in enumerate(product_losses(pair, texts)):
        on_stage("errors of products", number, len(pair.products))
        losses.products.append(product)
    if restore and TASKS[pair.after.manifest.task].generates and not _last_only(pair.after.model):
        with sessions(pair.folder) as open_model:
            measuring = Measuring(pair, texts, open_model, on_stage)
            losses.kl, losses.groups = measuring.total, list(measuring.groups())
        losses.remainder = remainder_of(losses.kl, losses.groups)
    losses.advice = list(advice(losses, pair.recipe))
    losses.remedy = next(iter(worth(losses)), None)
    if losses.remedy is not None and losses.remedy.matrices and quantizes(pair.recipe):
        losses.recipe = sparing(pair.recipe, losses.remedy.matrices)
    if weights:
        losses.histograms = list(_histograms(pair, losses.products))
    return losses


def product_losses(pair: Pair, texts: Sequence[IntArray]) -> Iterator[ProductLoss]:
    """Yield the errors of each product of a model beside its reference, on some texts, int64 [length] each."""
    for product, errors in pair.errors(texts):
        yield ProductLoss(node=product.name, role=product.role, layer=product.layer, bytes=product.bytes, **errors)


def _histograms(pair: Pair, errors: Sequence[ProductLoss]) -> Iterator[Histogram]:
    """Yield the histogram of the product of each role that errs most by itself."""
    nodes = {node.name: node for node in pair.after.model.graph}
    products = {product.name: product for product in pair.products}
    for role in dict.fromkeys(loss.role for loss in errors):
        worst = max((loss for loss in errors if loss.role == role), key=lambda loss: loss.local)
        counts = histogram(products[worst.node], nodes[worst.node])
        if counts is not None:
            yield counts


def _last_only(model: ir.Model) -> bool:
    logits = next((value for value in model.graph.outputs if value.name == "logits"), None)
    return logits is None or (logits.shape is not None and len(logits.shape) > 1 and logits.shape[1] == 1)
