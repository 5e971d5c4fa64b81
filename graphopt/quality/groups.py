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
    from collections.abc import Callable, Iterator, Sequence

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
    kinds = [each.only for each in groups if each.what == "role"]
    known = [each for each in kinds if each is not None]
    rest = next((each.kl for each in groups if each.what == "products"), None)
    if rest is None or len(known) < len(kinds):
        return None
    return Remainder(kinds=sum(known), rest=rest, together=total - rest - sum(known))


class Measuring:
    """Runs a model with groups of its products swapped for those of its reference, and the other way round.

    Args:
        pair: both models.
        texts: what they read, int64 [length] each.
        opened: opens models.
        on_stage: called when a run begins.
    """

    def __init__(self, pair: Pair, texts: Sequence[IntArray], opened: Open, on_stage: Progress) -> None:
        self.pair, self.texts, self.opened, self.on_stage = pair, texts, opened, on_stage
        self._expected = [log_probabilities(each) for each in self._logits(opened(pair.reference, {}), pair.reference)]
        self._known: dict[frozenset[str], Group] = {}
        after, products = pair.after.model, pair.products
        self.total = self._kl(opened(after, pair.entries), after)
        # Fed as the models that they are copies of; switches come on top.
        self._restorable = opened(restorable(after, products), pair.entries), after
        self._degradable = opened(degradable(pair.reference, after, products), pair.entries), pair.reference

    def groups(self) -> Iterator[Group]:
        """Yield the groups: inputs, all products, each role, then layers by halves and what is in those that matter."""
        products, whole = self.pair.products, self.pair.after.model
        exact = {**self.pair.entries, ACCURACY_LEVEL: "0"}
        if any(each.op_type == "DequantizeLinear" for each in whole.graph) and exact != self.pair.entries:
            yield Group(what="inputs", kl=self._kl(self.opened(whole, exact), whole), bytes=0)
        yield self._of(products, what="products")
        for role in dict.fromkeys(each.role for each in products):
            yield self._of([p for p in products if p.role == role], what="role", role=role)
        layers = sorted({each.layer for each in products if each.layer is not None})
        yield from self._halves(layers) if layers else ()

    def _halves(self, layers: list[int]) -> Iterator[Group]:
        inside = [p for p in self.pair.products if p.layer in layers]
        found = self._of(inside, what="layers", layers=layers)
        yield found
        least = SHARE * self.total
        if self.total - found.kl < least and (found.only or 0.0) < least:
            return
        if len(layers) > 1:
            middle = len(layers) // 2
            yield from self._halves(layers[:middle])
            yield from self._halves(layers[middle:])
            return
        for role in dict.fromkeys(each.role for each in inside):
            yield self._of([p for p in inside if p.role == role], what="both", role=role, layers=layers)

    def _of(self, products: Sequence[Product], **which: Any) -> Group:
        key = frozenset(each.name for each in products)
        if key not in self._known:
            weights = [weight_of(node, 1) for each in products for node in each.floats]
            self._known[key] = Group(
                what="products",
                kl=self._kl(*self._restorable, lambda name: name in key),
                only=self._kl(*self._degradable, lambda name: name not in key),
                bytes=sum(each.float_bytes - each.bytes for each in products),
                matrices=[value.name for value in weights if value is not None and value.name],
            )
        return self._known[key].model_copy(update=which)

    def _kl(self, session: Any, model: ir.Model, in_floats: Callable[[str], bool] = lambda name: False) -> float:
        self.on_stage("running with some products in floats")
        found = Comparison()
        logits = self._logits(session, model, in_floats)
        for ids, expected, made in zip(self.texts, self._expected, logits, strict=True):
            found.add(expected[:-1], made[:-1], ids[1:])
        return float(found.columns()[2].mean())

    def _logits(
        self, session: Any, model: ir.Model, in_floats: Callable[[str], bool] = lambda name: False
    ) -> Iterator[Floats]:
        asked = {each.name for each in session.get_inputs()}
        switches = {switch_of(each): np.array(in_floats(each.name)) for each in self.pair.products}
        for ids in self.texts:
            feeds = {**self.pair.task.text_feeds(model.graph, ids[None]), **switches}
            fed = {name: array for name, array in feeds.items() if name in asked}
            yield run(session, ["logits"], fed)[0][0].astype(np.float32)
