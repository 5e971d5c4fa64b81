"""Where a compressed model loses quality: product by product, beside the same recipe without its lossy steps.

reference   the exact steps of the recipe on BEFORE: the same graph and bases, nothing rounded
local       a product of AFTER on inputs of the reference: what its own rounding does
accumulated the same product inside AFTER: with all that came before it
spread      outliers of what a product reads: in BEFORE, and in the reference, whose rotations have been at it

Errors are taken in the basis of the reference, whose exact steps rotate as AFTER does: no rotation counts as an error.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from graphopt.ort.session import Array, run
from graphopt.quality.correspondence import Product, products_of
from graphopt.quality.product_sessions import Open, cut_out, expose_values, names_of, sessions
from graphopt.quality.spread import Moments
from graphopt.tasks import TASKS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    import onnx_ir as ir

    from graphopt.artifact.artifact import Artifact
    from graphopt.passes.recipe import Recipe
    from graphopt.tasks.ports import IntArray

LIMIT = 1 << 30
"""Bytes of inputs and outputs of products that are held at once."""


@dataclass
class Sums:
    """Squares of what a product makes and of its errors, over tokens; the first of each window apart."""

    signal: float = 0.0
    local: float = 0.0
    accumulated_error: float = 0.0
    first: list[float] = field(default_factory=lambda: [0.0, 0.0])
    same_tokens: bool = True
    inputs: Moments = field(default_factory=Moments)
    inputs_before: Moments = field(default_factory=Moments)

    def add(self, reference: Array, local_output: Array, inside: Array) -> None:
        """Add what one window makes, [1, tokens, columns] each; an expert may be given other tokens inside."""
        wide = [array.astype(np.float64).reshape(-1, array.shape[-1]) for array in (reference, local_output, inside)]
        self.signal += float(np.square(wide[0][1:]).sum())
        self.local += float(np.square(wide[1][1:] - wide[0][1:]).sum())
        self.same_tokens = self.same_tokens and wide[0].shape == wide[2].shape
        if not self.same_tokens:
            return
        self.accumulated_error += float(np.square(wide[2][1:] - wide[0][1:]).sum())
        self.first[0] += float(np.square(wide[0][:1]).sum())
        self.first[1] += float(np.square(wide[2][:1] - wide[0][:1]).sum())

    def figures(self) -> dict[str, Any]:
        """Return the fields of a :class:`graphopt.quality.losses.ProductLoss` that are measured."""
        return {
            "local": _share(self.local, self.signal),
            "accumulated": _share(self.accumulated_error, self.signal) if self.same_tokens else None,
            "first_token": _share(self.first[1], self.first[0]) if self.same_tokens else None,
            "read": self.inputs.spread(),
            "read_before": self.inputs_before.spread(),
        }


def _share(part: float, whole: float) -> float:
    return float(np.sqrt(part / whole)) if whole else 0.0


class Pair:
    """AFTER and its reference, with their products.

    Args:
        before: what AFTER was made from.
        after: an artifact of ``graphopt optimize``.
        reference: what the exact steps of the recipe of AFTER make of BEFORE.
        recipe: that recipe.
        folder: an empty one, for weights and models while they run.
    """

    def __init__(self, before: Artifact, after: Artifact, reference: ir.Model, recipe: Recipe, folder: Path) -> None:
        self.before, self.after, self.reference, self.recipe, self.folder = before, after, reference, recipe, folder
        self.task = TASKS[self.after.manifest.task]
        self.entries = self.after.manifest.session
        self.products, self.names_without_partner = products_of(self.reference, self.after.model)

    def errors(self, texts: Sequence[IntArray], limit: int = LIMIT) -> Iterator[tuple[Product, dict[str, Any]]]:
        """Yield the errors of each product on some texts, int64 [length] each, and the spread of what it reads."""
        longest = max(len(ids) for ids in texts)
        for chunk in _chunks(self.products, longest, limit):
            with sessions(self.folder) as open_model:
                sums = self._sums(chunk, texts, open_model)
                yield from ((product, sums[product.name].figures()) for product in chunk)

    def _sums(self, products: list[Product], texts: Sequence[IntArray], open_model: Open) -> dict[str, Sums]:
        """Run both models and the products solo, and return the sums of each product by its name."""
        sources = _inputs(self.before.model)
        first = {product.name: sources[name] for product in products if (name := product.floats[0].name) in sources}
        start = open_model(expose_values(self.before.model, first.values()), {}) if first else None
        exact = open_model(expose_values(self.reference, _floats(products)), {})
        inside = open_model(expose_values(self.after.model, [product.output for product in products]), self.entries)
        ports = [(product.data, product.output) for product in products]
        solo = open_model(cut_out(self.after.model, ports), self.entries)
        sums = {product.name: Sums() for product in products}
        for ids in texts:
            source_values = {} if start is None else self._run(start, self.before.model, ids)
            exact_values = self._run(exact, self.reference, ids)
            inner_values = self._run(inside, self.after.model, ids)
            inputs = {product.data: exact_values[product.data] for product in products}
            local_values = dict(zip(names_of(solo), run(solo, None, inputs), strict=True))
            for product in products:
                parts = [exact_values[node.outputs[0].name or ""] for node in product.floats]
                total, output = sums[product.name], product.output
                total.add(np.concatenate(parts, -1), local_values[output], inner_values[output])
                total.inputs.add(_behind_the_first(exact_values[product.float_input]))
                if product.name in first:
                    total.inputs_before.add(_behind_the_first(source_values[first[product.name]]))
        return sums

    def _run(self, session: Any, model: ir.Model, ids: IntArray) -> dict[str, Array]:
        feeds = self.task.text_feeds(model.graph, ids[None])
        names = {port.name for port in session.get_inputs()}
        outputs = run(session, None, {name: array for name, array in feeds.items() if name in names})
        return dict(zip(names_of(session), outputs, strict=True))


def _inputs(model: ir.Model) -> dict[str, str]:
    """Return what each node multiplies by a matrix, by the names of both."""
    products = (node for node in model.graph if node.op_type in ("MatMul", "Gemm") and not node.domain)
    inputs = ((node.name, node.inputs[0]) for node in products)
    return {name: value.name for name, value in inputs if name and value is not None and value.name}


def _behind_the_first(numbers: Array) -> Array:
    """Return numbers [1, tokens, columns] without the first token of the window, which is often huge."""
    return numbers.reshape(-1, numbers.shape[-1])[1:]


def _floats(products: Iterable[Product]) -> list[str]:
    """Return the names of what products read and make in the reference."""
    names: list[str] = []
    for product in products:
        names += [product.data, product.float_input, *(node.outputs[0].name or "" for node in product.floats)]
    return list(dict.fromkeys(names))


def _chunks(products: Sequence[Product], tokens: int, limit: int) -> Iterator[list[Product]]:
    """Yield runs of products whose inputs and outputs take at most ``limit`` bytes, or one product."""
    chunk: list[Product] = []
    room = limit
    for product in products:
        shapes = [node.inputs[1].shape.numpy() for node in product.floats if node.inputs[1] is not None]  # type: ignore[union-attr]
        size = 4 * tokens * sum(int(shape[0]) + 3 * int(shape[1]) for shape in shapes)
        if chunk and size > room:
            yield chunk
            chunk, room = [], limit
        chunk.append(product)
        room -= size
    if chunk:
        yield chunk
