"""Where quality was lost, as tables: one row for each kind of product, one for each group of layers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np

from graphopt.quality.spread import Spread
from graphopt.report.console_table import ConsoleTable, figure_columns
from graphopt.report.escape import plain, ranges
from graphopt.report.sentences import sentence
from graphopt.report.tables import size_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from graphopt.quality.groups import Group
    from graphopt.quality.losses import Losses, ProductLoss

_LINES = 8


def errors_table(losses: Losses) -> ConsoleTable:
    """Show the errors of products by role, all layers together."""
    names = ("products", "alone", "worst", "in layer", "inside: first layer", "last layer", "first token")
    table = ConsoleTable(["role", *figure_columns(*names)])
    for role in dict.fromkeys(product.role for product in losses.products):
        products = [product for product in losses.products if product.role == role]
        worst = max(products, key=lambda product: product.local)
        median = float(np.median([product.local for product in products]))
        inside = (products[0].accumulated, products[-1].accumulated, products[-1].first_token)
        cells = [str(len(products)), f"{median:.1%}", f"{worst.local:.1%}", _layer(worst), *map(percent, inside)]
        table.add_row(role, *cells)
    return table


def spread_table(losses: Losses) -> ConsoleTable | None:
    """Show outliers of what products read, before and after the rotations; ``None`` where they were not measured."""
    names = ("kurtosis before", "kurtosis after", "largest before", "largest after")
    table = ConsoleTable(["role", *figure_columns(*names)])
    for role in dict.fromkeys(product.role for product in losses.products):
        products = [product for product in losses.products if product.role == role and product.read is not None]
        sides = [
            _median_spread([product.read_before for product in products]),
            _median_spread([product.read for product in products]),
        ]
        if any(sides):
            cells = [
                [f"{product.kurtosis:.1f}", f"{product.largest:.1f}"] if product else ["", ""] for product in sides
            ]
            table.add_row(role, *(cells[side][figure] for figure in (0, 1) for side in (0, 1)))
    return table if table.rows else None


def groups_table(losses: Losses) -> ConsoleTable | None:
    """Show what groups of products do to the divergence; ``None`` where that was not measured."""
    if losses.kl is None:
        return None
    names = ("KL: only this", "all but this", "comes back", "costs")
    table = ConsoleTable(["quantized", *figure_columns(*names)])
    table.add_row("everything", f"{losses.kl:.4f}", "", "", "")
    for group in losses.groups:
        back = round((losses.kl - group.kl) / losses.kl, 2) + 0.0 if losses.kl else 0.0  # never "-0%"
        kl_alone = "" if group.only is None else f"{group.only:.4f}"
        table.add_row(group_name(group), kl_alone, f"{group.kl:.4f}", f"{back:.0%}", size_text(group.bytes))
    return table


def group_name(group: Group) -> str:
    """Return what a group of products is called."""
    if group.what == "both":
        return f"{group.role} of layer {ranges(group.layers)}"
    if group.what == "layers":
        return f"{'layers' if len(group.layers) > 1 else 'layer'} {ranges(group.layers)}"
    return group.role or {"inputs": "inputs of products", "products": "all products"}[group.what]


def percent(value: float | None) -> str:
    """Return a share in percent; "" where it is not known."""
    return "" if value is None else f"{value:.1%}"


def summary_lines(losses: Losses) -> Iterator[str]:
    """Say what the columns are, and what the figures support."""
    yield (
        f"errors are relative to what a product makes in floats, on {losses.tokens:,} tokens: alone, with inputs of "
        "the float model; inside the model, in the first layer and in the last; first token: that of each text, inside"
    )
    if any(product.read is not None for product in losses.products):
        yield "kurtosis and largest (over the root mean square) are of inputs: of the model before, and after rotations"
    if losses.remainder is not None:
        yield remainder(losses)
    yield from (f"advice: {plain(sentence(product), 300)}" for product in losses.advice)
    if losses.remedy is not None and losses.recipe is not None:
        yield "the most for its bytes, as lines for the recipe (`--recipe FILE` writes all of it):"
        yield from (f"  {line}" for line in recipe_lines(losses.remedy))
    if losses.unmatched:
        yield f"not measured, no counterpart in the float model: {', '.join(map(plain, losses.unmatched[:8]))}"


def remainder(losses: Losses) -> str:
    """Say what of the divergence no kind of product explains."""
    assert losses.remainder is not None
    kinds, outside, interaction = (losses.remainder.kinds, losses.remainder.rest, losses.remainder.together)
    effect = "strengthen" if interaction > 0 else "cancel"
    return (
        f"one by one, the kinds of products cause {kinds:.4f} nats, and what is not a product {outside:.4f}; the other "
        f"{interaction:+.4f} of {losses.kl or 0:.4f} do not add up: errors of several kinds {effect} each other"
    )


def recipe_lines(remedy: Group, limit: int = _LINES) -> list[str]:
    """Return the lines of a recipe that leave a group of products in floats; at most ``limit`` of them are matrices."""
    names = remedy.matrices
    lines = ["- step: quantize_weights", "  matrices:"]
    lines += [f"    {json.dumps(plain(name, 300))}: null" for name in names[:limit]]
    return [*lines, f"    # and {len(names) - limit} more"] if len(names) > limit else lines


def _layer(product: ProductLoss) -> str:
    return "" if product.layer is None else str(product.layer)


def _median_spread(spreads: Sequence[Spread | None]) -> Spread | None:
    values = [spread for spread in spreads if spread is not None]
    if not values:
        return None
    medians = {name: float(np.median([getattr(spread, name) for spread in values])) for name in ("kurtosis", "largest")}
    return Spread(**medians)
