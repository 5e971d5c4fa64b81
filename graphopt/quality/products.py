"""Where a compressed model loses quality: product by product, beside the same recipe without its lossy steps.

reference   the exact steps of the recipe on BEFORE: the same graph and bases, nothing rounded
local       a product of AFTER on inputs of the reference: what its own rounding does
accumulated the same product inside AFTER: with all that came before it
restored    AFTER with some products computed in floats: how much of the divergence they cause
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from graphopt import artifact as artifacts
from graphopt.analysis.folding import fold
from graphopt.analysis.folding.labels import matrix_of, rounds
from graphopt.analysis.folding.trunk import constant_nodes
from graphopt.analysis.roles import roles_of
from graphopt.analysis.token_cost import constants_of
from graphopt.artifact import Artifact
from graphopt.checks.steps import run_passes
from graphopt.editing import like, take_place
from graphopt.errors import InputError
from graphopt.passes.context import Surroundings
from graphopt.quality.parts import cut_out, names_of, sessions, tapped
from graphopt.recipe import Recipe
from graphopt.running import Runner
from graphopt.runtime import Array, run
from graphopt.runtime_ops import declare
from graphopt.tasks import TASKS
from graphopt.tasks.ports import IntArray
from graphopt.weights import new_weight, weight_of

LIMIT = 1 << 30
"""Bytes of inputs and outputs of products that are held at once."""

_FRONT = 2
"""Nodes in front of a product that a kernel may have taken in."""


@dataclass(frozen=True)
class Product:
    """A product of AFTER with what it was in floats.

    Attributes:
        name: of the node.
        role: what it is for.
        layer: where; ``None`` outside of layers.
        data: the name of what it multiplies, before any rounding.
        made: the name of its result.
        floats: the nodes of the reference that it was made of; several where it merges them.
        front: the nodes of the reference that turn ``data`` before these read it, where the product does so itself.
        bytes: of its weights as they are stored.
        float_bytes: the same in the reference.
    """

    name: str
    role: str
    layer: int | None
    data: str
    made: str
    floats: tuple[ir.Node, ...]
    front: tuple[ir.Node, ...]
    bytes: int
    float_bytes: int


@dataclass
class Sums:
    """Squares of what a product makes and of its errors, over tokens; the first of each window apart."""

    signal: float = 0.0
    local: float = 0.0
    accumulated: float = 0.0
    first: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def add(self, wanted: Array, alone: Array, inside: Array) -> None:
        """Add one window, [1, tokens, columns] each."""
        wide = [each.astype(np.float64).reshape(-1, each.shape[-1]) for each in (wanted, alone, inside)]
        self.signal += float(np.square(wide[0][1:]).sum())
        self.local += float(np.square(wide[1][1:] - wide[0][1:]).sum())
        self.accumulated += float(np.square(wide[2][1:] - wide[0][1:]).sum())
        self.first[0] += float(np.square(wide[0][0]).sum())
        self.first[1] += float(np.square(wide[2][0] - wide[0][0]).sum())

    def figures(self) -> dict[str, float]:
        """Return errors relative to what the product makes: root of the mean square over that of the reference."""
        return {
            "local": _share(self.local, self.signal),
            "accumulated": _share(self.accumulated, self.signal),
            "first_token": _share(self.first[1], self.first[0]),
        }


def _share(part: float, whole: float) -> float:
    return float(np.sqrt(part / whole)) if whole else 0.0


class Pair:
    """AFTER and its reference, with their products.

    Args:
        before: what AFTER was made from.
        after: an artifact of ``graphopt optimize``.
        folder: an empty one, for weights and models while they run.

    Raises:
        InputError: AFTER has no recipe, or the exact steps of it cannot be run again.
    """

    def __init__(self, before: Path, after: Path, folder: Path) -> None:
        self.folder = folder
        self.after = artifacts.read(after)
        self.reference, self.recipe = reference_of(artifacts.read(before), self.after, after)
        self.task = TASKS[self.after.manifest.task]
        self.entries = self.after.manifest.session
        self.products, self.unmatched = _products(self.reference, self.after.model)

    def errors(self, texts: Sequence[IntArray], limit: int = LIMIT) -> Iterator[tuple[Product, dict[str, float]]]:
        """Yield the errors of each product on some texts, int64 [length] each."""
        longest = max(len(ids) for ids in texts)
        for chunk in _chunks(self.products, longest, limit):
            with sessions(self.folder) as opened:
                exact = opened(tapped(self.reference, _floats(chunk)), {})
                inside = opened(tapped(self.after.model, [each.made for each in chunk]), self.entries)
                alone = opened(cut_out(self.after.model, [(each.data, each.made) for each in chunk]), self.entries)
                sums = {each.name: Sums() for each in chunk}
                for ids in texts:
                    known = self._run(exact, self.reference, ids)
                    within = self._run(inside, self.after.model, ids)
                    inputs = {each.data: known[each.data] for each in chunk}
                    local = dict(zip(names_of(alone), run(alone, None, inputs), strict=True))
                    for each in chunk:
                        parts = [known[node.outputs[0].name or ""] for node in each.floats]
                        sums[each.name].add(np.concatenate(parts, -1), local[each.made], within[each.made])
                yield from ((each, sums[each.name].figures()) for each in chunk)

    def _run(self, session: Any, model: ir.Model, ids: IntArray) -> dict[str, Array]:
        feeds = self.task.text_feeds(model.graph, ids[None])
        asked = {each.name for each in session.get_inputs()}
        made = run(session, None, {name: array for name, array in feeds.items() if name in asked})
        return dict(zip(names_of(session), made, strict=True))

    def restored(self, products: Iterable[Product]) -> ir.Model:
        """Return AFTER with some products in floats, as the reference has them."""
        model = self.after.model.clone()
        nodes = {node.name: node for node in model.graph}
        values = {value.name: value for node in model.graph for value in node.outputs}
        for product in products:
            node = nodes[product.name]
            data = values.get(product.data) or next(v for v in model.graph.inputs if v.name == product.data)
            matrix = new_weight(model.graph, f"{product.name}.restored", _matrix(product))
            made = []
            for turned in product.front:
                read = [data if value is turned.inputs[0] else _copied(value, model) for value in turned.inputs]
                made.append(like(turned, read, f"{product.name}.{turned.name}"))
                data = made[-1].outputs[0]
                data.name = f"{product.name}.{turned.outputs[0].name}"
            made.append(ir.node("MatMul", [data, matrix], name=f"{product.name}.in_floats"))
            model.graph.insert_after(node, made)
            take_place(node.outputs[0], made[-1].outputs[0])
        declare(model)
        return model


def reference_of(before: Artifact, after: Artifact, file: Path) -> tuple[ir.Model, Recipe]:
    """Return what the exact steps of the recipe of ``after`` make of ``before``, and the recipe.

    Raises:
        InputError: there is no recipe, or one of the steps cannot be run.
    """
    if after.manifest.recipe is None:
        raise InputError(
            "its manifest has no recipe, so nothing of it can be restored",
            file=file,
            remedy="give a folder that `graphopt optimize` wrote, and what it was made from",
        )
    recipe = Recipe.recorded(after.manifest.recipe)
    steps = [step for step in recipe.passes() if step.effect == "exact"]
    model = before.model.clone()
    shared = Surroundings(TASKS[before.manifest.task], recipe.target, Runner(recipe.session_entries()))
    for _ in run_passes(model, steps, shared, on_pass=lambda step: None):
        pass
    return model, recipe


def _products(reference: ir.Model, after: ir.Model) -> tuple[list[Product], list[str]]:
    """Return the products of AFTER that have partners in the reference, and the names of the others."""
    folded = fold(after.graph)
    roles, layers, constant = roles_of(after.graph, folded), folded.layer_of(), constant_nodes(after.graph)
    exact_constant = constant_nodes(reference.graph)
    exact = [n for n in reference.graph if matrix_of(n, exact_constant) is not None and weight_of(n, 1) is not None]
    by_name = {node.name: node for node in exact}
    by_value: dict[str | None, list[ir.Node]] = {}
    for node in exact:
        by_value.setdefault(node.inputs[0].name if node.inputs[0] else None, []).append(node)
    found, unmatched = [], []
    for node in after.graph:
        matrix = matrix_of(node, constant)
        if matrix is None or node in constant:
            continue
        data = node.inputs[0]
        while data is not None and (maker := data.producer()) is not None and rounds(maker):
            data = maker.inputs[0]
        partner = by_name.get(node.name)
        same = partner is not None and matrix_of(partner, exact_constant) == matrix
        floats = [partner] if same and partner is not None else []
        merged = [] if floats or data is None else by_value.get(data.name, [])
        sizes = [matrix_of(each, exact_constant) for each in merged]
        if merged and sum(size[1] for size in sizes if size is not None) == matrix[1]:
            floats = merged
        plain = all(each.op_type == "MatMul" for each in floats)
        front = _front(floats[0], data.name or "", exact_constant) if data is not None and floats else None
        if data is None or front is None or not plain or node.outputs[0].dtype not in (None, ir.DataType.FLOAT):
            unmatched.append(node.name or "?")
            continue
        found.append(
            Product(
                name=node.name or "",
                role=roles[node],
                layer=layers.get(node),
                data=data.name or "",
                made=node.outputs[0].name or "",
                floats=tuple(floats),
                front=tuple(front),
                bytes=_bytes(constants_of(node, constant)),
                float_bytes=_bytes(each.inputs[1] for each in floats),
            )
        )
    return found, unmatched


def _bytes(values: Iterable[ir.Value | None]) -> int:
    return sum(value.const_value.nbytes for value in values if value is not None and value.const_value is not None)


def _matrix(product: Product) -> ir.TensorProtocol:
    parts = [node.inputs[1].const_value for node in product.floats if node.inputs[1] is not None]
    arrays = [part.numpy() for part in parts if part is not None]
    return ir.tensor(arrays[0] if len(arrays) == 1 else np.concatenate(arrays, 1))


def _copied(value: ir.Value | None, model: ir.Model) -> ir.Value | None:
    return None if value is None else new_weight(model.graph, value.name or "copied", value.const_value)


def _front(product: ir.Node, name: str, constant: set[ir.Node]) -> list[ir.Node] | None:
    """Return the nodes that turn the value of a name into what a product reads; ``None`` where another leads to it."""
    found: list[ir.Node] = []
    value = product.inputs[0]
    while value is not None and value.name != name:
        maker = value.producer()
        if maker is None or maker in constant or len(found) == _FRONT:
            return None
        if any(each is not None and not each.is_initializer() for each in maker.inputs[1:]):
            return None
        found.insert(0, maker)
        value = maker.inputs[0]
    return None if value is None else found


def _floats(products: Iterable[Product]) -> list[str]:
    """Return the names of what products read and make in the reference."""
    names = [name for each in products for name in (each.data, *(node.outputs[0].name or "" for node in each.floats))]
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
