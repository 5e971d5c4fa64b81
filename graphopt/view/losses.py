"""Where quality was lost, as tables: one row for each kind of product, one for each group of layers."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
from rich.table import Column, Table
from rich.text import Text

from graphopt.quality.losses import Losses, ProductLoss
from graphopt.view.plain import plain, ranges
from graphopt.view.sentences import sentence
from graphopt.view.tables import megabytes

_LINES = 8


def errors_table(found: Losses) -> Table:
    """Show the errors of products by role, all layers together; with what restoring them brings."""
    restored = {each.role: each for each in found.restored if each.what == "role"}
    right = [Column(name, justify="right") for name in ("products", "alone", "worst", "in layer", "first", "last")]
    table = Table("role", *right)
    if restored:
        for name in ("in floats: KL", "costs"):
            table.add_column(name, justify="right")
    for role in dict.fromkeys(each.role for each in found.products):
        those = [each for each in found.products if each.role == role]
        worst = max(those, key=lambda one: one.local)
        usual = float(np.median([each.local for each in those]))
        inside = (f"{each.accumulated:.1%}" for each in (those[0], those[-1]))
        cells = [str(len(those)), f"{usual:.1%}", f"{worst.local:.1%}", _layer(worst), *inside]
        if role in restored:
            cells += [f"{restored[role].kl:.4f}", megabytes(restored[role].bytes)]
        table.add_row(Text(role), *cells)
    return table


def restored_table(found: Losses) -> Table | None:
    """Show what comes back where some products are in floats; ``None`` where that was not measured."""
    if found.kl is None:
        return None
    table = Table("in floats", *(Column(name, justify="right") for name in ("KL", "comes back", "costs")))
    table.add_row("nothing", f"{found.kl:.4f}", "", "")
    said = {"inputs": "inputs of products", "products": "all products", "layers": "layers"}
    for each in found.restored:
        if each.what == "role":
            continue
        what = f"{said[each.what]} {ranges(each.layers)}" if each.layers else said[each.what]
        back = (found.kl - each.kl) / found.kl if found.kl else 0.0
        table.add_row(what, f"{each.kl:.4f}", f"{back:.0%}", megabytes(each.bytes))
    return table


def told(found: Losses) -> Iterator[str]:
    """Say what the columns are, and what the figures support."""
    yield (
        f"errors relative to what a product makes in floats, {found.tokens:,} tokens: alone, and inside the model in "
        "the first and the last layer"
    )
    yield from (f"advice: {plain(sentence(each), 300)}" for each in found.advice)
    yield from _lines(found)
    if found.unmatched:
        yield f"without a partner in floats: {', '.join(map(plain, found.unmatched[:8]))}"


def _lines(found: Losses) -> Iterator[str]:
    """Say which lines of a recipe leave what is worth most in floats."""
    if found.remedy is None or found.recipe is None:
        return
    yield "the most for its bytes, as lines for the recipe (`--recipe FILE` writes all of it):"
    yield "  - step: quantize_weights"
    yield "    matrices:"
    yield from (f"      {json.dumps(plain(name, 300))}: null" for name in found.remedy.matrices[:_LINES])
    if len(found.remedy.matrices) > _LINES:
        yield f"      # and {len(found.remedy.matrices) - _LINES} more"


def _layer(product: ProductLoss) -> str:
    return "" if product.layer is None else str(product.layer)
