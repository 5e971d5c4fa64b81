"""How much of the divergence each group of products causes: kinds, layers, and kinds within the layers that matter.

    restored    the model with nothing but this group in floats
    only        the reference with nothing but this group quantized

Layers are halved: a group of layers is looked into only where one of both figures is a tenth of the divergence or more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from graphopt.graph.weights import weight_of
from graphopt.ort.session import ACCURACY_LEVEL, run
from graphopt.quality.figures import Comparison, Floats, log_probabilities
from graphopt.quality.substitution import degradable, restorable, switch_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    import onnx_ir as ir

    from graphopt.quality.correspondence import Product
    from graphopt.quality.product_sessions import Open
    from graphopt.quality.products import Pair
    from graphopt.tasks.ports import IntArray
    from graphopt.util.progress import Progress

SHARE = 0.1
"""Of the divergence, what makes a group worth a closer look."""


class Group(BaseModel):
    """What a group of products does to the divergence from the reference, in nats per token.

    Attributes:
        what: ``products`` for all of them, ``role``, ``layers``, ``both`` for one role of one layer; or ``inputs``,
            where only the inputs of products are in floats.
        role: which role.
        layers: which layers.
        kl: divergence with this group in floats and all else as it is in the model.
        only: divergence with this group quantized and all else in floats; ``None`` for ``inputs``.
        bytes: that the group costs in floats, beyond what it takes now.
        matrices: its weights, by the names that the step ``quantize_weights`` knows.
    """

    model_config = ConfigDict(extra="forbid")

    what: Literal["products", "role", "layers", "both", "inputs"]
    role: str | None = None
    layers: list[int] = []
    kl: float
    only: float | None = None
    bytes: int
    matrices: list[str] = []


class Remainder(BaseModel):
    """What of the divergence no single group explains. In nats per token.

    Attributes:
        kinds: what the kinds of products cause one by one, added up.
        rest: what stays with all products in floats: token embedding, caches, other steps.
        together: what is left of the divergence: errors of several kinds strengthen each other, or cancel (below 0).
    """

    model_config = ConfigDict(extra="forbid")

    kinds: float
    rest: float
    together: float


def remainder_of(total: float, groups: Sequence[Group]) -> Remainder | None:
    """Return what does not add up; ``None`` where not all kinds were measured."""
    kinds = [group.only for group in groups if group.what == "role"]
    numbers = [group for group in kinds if group is not None]
    outside = next((group.kl for group in groups if group.what == "products"), None)
    if outside is None or len(numbers) < len(kinds):
        return None
    return Remainder(kinds=sum(numbers), rest=outside, together=total - outside - sum(numbers))


class Measuring:
    """Runs a model with groups of its products swapped for those of its reference, and the other way round.

    Args:
        pair: both models.
        texts: what they read, int64 [length] each.
        opened: opens models.
        on_stage: called when a run begins.
    """

    def __init__(self, pair: Pair, texts: Sequence[IntArray], open_model: Open, on_stage: Progress) -> None:
        self.pair, self.texts, self.open_model, self.on_stage = pair, texts, open_model, on_stage
        self._reference = [
            log_probabilities(logits) for logits in self._logits(open_model(pair.reference, {}), pair.reference)
        ]
        self._groups: dict[frozenset[str], Group] = {}
        self._names = {product.name for product in pair.products}
        after, products = pair.after.model, pair.products
        self.total = self._kl(open_model(after, pair.entries), after)
        # Fed as the models that they are copies of; switches come on top.
        self._restorable = open_model(restorable(after, products), pair.entries), after
        self._degradable = open_model(degradable(pair.reference, after, products), pair.entries), pair.reference

    def groups(self) -> Iterator[Group]:
        """Yield the groups: inputs, all products, each role, then layers by halves and what is in those that matter."""
        products, whole = self.pair.products, self.pair.after.model
        exact = {**self.pair.entries, ACCURACY_LEVEL: "0"}
        if any(node.op_type == "DequantizeLinear" for node in whole.graph) and exact != self.pair.entries:
            yield Group(what="inputs", kl=self._kl(self.open_model(whole, exact), whole), bytes=0)
        yield self._group(products, what="products")
        for role in dict.fromkeys(node.role for node in products):
            yield self._group([p for p in products if p.role == role], what="role", role=role)
        layers = sorted({node.layer for node in products if node.layer is not None})
        yield from self._halves(layers) if layers else ()

    def _halves(self, layers: list[int]) -> Iterator[Group]:
        inside = [p for p in self.pair.products if p.layer in layers]
        group = self._group(inside, what="layers", layers=layers)
        yield group
        threshold = SHARE * self.total
        if self.total - group.kl < threshold and (group.only or 0.0) < threshold:
            return
        if len(layers) > 1:
            middle = len(layers) // 2
            yield from self._halves(layers[:middle])
            yield from self._halves(layers[middle:])
            return
        for role in dict.fromkeys(product.role for product in inside):
            yield self._group([p for p in inside if p.role == role], what="both", role=role, layers=layers)

    def _group(self, products: Sequence[Product], **fields: Any) -> Group:
        key = frozenset(product.name for product in products)
        if key not in self._groups:
            weights = [weight_of(node, 1) for product in products for node in product.floats]
            self._groups[key] = Group(
                what="products",
                kl=self._kl(*self._restorable, key),
                only=self._kl(*self._degradable, self._names - key),
                bytes=sum(product.float_bytes - product.bytes for product in products),
                matrices=[value.name for value in weights if value is not None and value.name],
            )
        return self._groups[key].model_copy(update=fields)

    def _kl(self, session: Any, model: ir.Model, in_floats: Collection[str] = ()) -> float:
        self.on_stage("running with some products in floats")
        comparison = Comparison()
        logits = self._logits(session, model, in_floats)
        for ids, reference, logits_ in zip(self.texts, self._reference, logits, strict=True):
            comparison.add(reference[:-1], logits_[:-1], ids[1:])
        return float(comparison.columns()[2].mean())

    def _logits(self, session: Any, model: ir.Model, in_floats: Collection[str] = ()) -> Iterator[Floats]:
        names = {port.name for port in session.get_inputs()}
        switches = {switch_of(product): np.array(product.name in in_floats) for product in self.pair.products}
        for ids in self.texts:
            feeds = {**self.pair.task.text_feeds(model.graph, ids[None]), **switches}
            inputs = {name: array for name, array in feeds.items() if name in names}
            yield run(session, ["logits"], inputs)[0][0].astype(np.float32)
