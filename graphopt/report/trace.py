"""The data model behind ``inspect``, ``diff`` and their JSON: what a model consists of, and how it came to be.

A trace has stages, one for each pass that ran; nodes and weights of the model as it is; folds, which say what of it is
the same; edges, which lead from a node back to what it was made from; and measures. Everything is found by its place in
a list, or by the name of a node.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from graphopt.graph.diagnostics import Check, Effect, Fact

VERSION: Literal["graphopt.trace/1"] = "graphopt.trace/1"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Stage(_Part):
    """What one run of a pass left behind.

    Attributes:
        name: the pass.
        run: which of its runs, from 1.
        effect: what the pass declares of itself.
        seconds: how long it took.
        changed: how many places it changed.
        left: how many it left alone.
        removed: how many nodes it took away.
        checks: what was proved or measured after it, without findings.
    """

    name: str
    run: int
    effect: Effect
    seconds: float
    changed: int
    left: int
    removed: int
    checks: list[Check] = []


class SkipReason(_Part):
    """Why a pass left a node alone."""

    by: str
    why: Fact


class Node(_Part):
    """A node of the model.

    Attributes:
        name: as the file has it.
        operator: type, behind its domain where that is not ONNX's own.
        role: what it is for, told by structure: ``q_proj``, ``down_proj``, ``attention``, ``lm_head``.
        layer: the layer that it is in, ``None`` outside of layers.
        fold: the fold of that layer, as a place in the list of folds.
        place: where it stands in the order that all layers of the fold have in common.
        reads: the nodes whose results it reads, as places in the list of nodes.
        weights: the weights that it reads, as places in their list.
        computes: what it rounds its inputs to, or computes in; ``None`` where it reads no weight and no cache.
        runner: who runs it: ``onnxruntime``, ``kernel`` of graphopt, or the ``body`` that the file carries.
        passes: the passes that made or edited it, or its weights, oldest first.
        left: the passes that left it alone, and why.
    """

    name: str
    operator: str
    role: str
    layer: int | None = None
    fold: int | None = None
    place: int | None = None
    reads: list[int] = []
    weights: list[int] = []
    computes: str | None = None
    runner: str = "onnxruntime"
    passes: list[str] = []
    left: list[SkipReason] = []


class Weight(_Part):
    """A tensor that the file stores.

    Attributes:
        name: as the file has it.
        format: what its numbers are stored in, such as ``int4``; ``scales`` for what belongs to codes.
        group: how many numbers share a scale, ``None`` where that is not known or does not apply.
        shape: as it is stored.
        parameters: how many numbers of the model it holds; 0 for scales.
        bytes: as it is stored.
        same_as: the weight before it, as a place in their list, whose bytes it shares; both are stored once.
    """

    name: str
    format: str
    group: int | None
    shape: list[int]
    parameters: int
    bytes: int
    same_as: int | None = None


class Fold(_Part):
    """Layers of one structure.

    Attributes:
        layers: their numbers; the first is the archetype.
        exceptions: of these, the layers whose numbers are stored in another way than those of most.
    """

    layers: list[int]
    exceptions: list[int] = []


class Repeat(_Part):
    """Equal parts one behind the other, from tokens to logits.

    Attributes:
        count: how many there are.
        parts: what is repeated: repeats, and single layers as places in the list of folds.
    """

    count: int
    parts: list[Repeat | int]


class Measure(_Part):
    """A figure: of what, which, how much.

    Attributes:
        subject: the name of a node, or "" for the model.
        metric: such as ``operations/token``.
        value: how much.
        unit: of the value.
    """

    subject: str
    metric: str
    value: float
    unit: str


class Change(_Part):
    """One thing that is different between a node and its partner.

    Attributes:
        what: ``operator``, ``attribute``, ``weight``, ``input``, ``output`` or ``port``.
        name: which one: the name of the attribute or port, the place of the input.
        before: what it was.
        after: what it is.
        figures: of a weight of the same format how far it moved: ``changed`` (share of its numbers), ``relative`` (root
            of the mean squared difference over that of the weight), ``largest``.
    """

    what: Literal["operator", "attribute", "weight", "input", "output", "port"]
    name: str
    before: str
    after: str
    figures: dict[str, float] = {}


class Edge(_Part):
    """What became of nodes of one model in another: from several to several.

    Attributes:
        kind: ``edited`` nodes have the same operator; ``replaced`` ones another, or another number of nodes.
        before: names of the nodes in the first model.
        after: names of the nodes in the second.
        operators: of both.
        role: what the node is for; that of the first node after, or before.
        layer: the layer of that node.
        passes: the passes that did it, where the second model has a record.
        by: what tells that they belong together: the ``record`` of the passes, or what they were matched by.
        confidence: of a match, 1 for the record; an order, not a probability.
        changes: what is different.
    """

    kind: Literal["edited", "replaced", "added", "removed"]
    before: list[str] = []
    after: list[str] = []
    operators: tuple[list[str], list[str]] = ([], [])
    role: str
    layer: int | None = None
    passes: list[str] = []
    by: str = "record"
    confidence: float = 1.0
    changes: list[Change] = []


class Group(_Part):
    """Equal edges of several layers.

    Attributes:
        edges: as places in the list of edges; the first is the archetype.
        layers: of these.
        missing: layers of the same structure in which there is no such edge.
    """

    edges: list[int]
    layers: list[int] = []
    missing: list[int] = []


class Diff(_Part):
    """How one model differs from another.

    Attributes:
        format: version of this layout.
        before: folder or file of the first model.
        after: of the second.
        equal: whether both are the same graph with the same weights; names of nodes and values do not count.
        record: whether the record of the passes led from one to the other; else they were matched by content.
        kept: how many nodes of the first model are in the second as they were.
        nodes: how many nodes both have.
        parameters: how many numbers both have.
        bytes: in how many bytes they are stored.
        stages: the passes that lead from the first to the second, in order.
        edges: what is different; what was kept has none.
        groups: equal edges together, the most first.
        ports: inputs and outputs of the models that are different.
        notes: what is the same but for names, and what could not be told.
    """

    format: Literal["graphopt.trace/1"] = VERSION
    before: str
    after: str
    equal: bool
    record: bool
    kept: int
    nodes: tuple[int, int]
    parameters: tuple[int, int]
    bytes: tuple[int, int]
    stages: list[Stage] = []
    edges: list[Edge] = []
    groups: list[Group] = []
    ports: list[Change] = []
    notes: list[str] = []


class Trace(_Part):
    """What a model consists of, and how it came to be.

    Attributes:
        format: version of this layout.
        model: the folder or file.
        context: tokens before the one that figures per token are about.
        stages: the passes, in order.
        repeats: the layers, folded.
        folds: layers of one structure.
        nodes: in the order of the graph.
        weights: in the order of the file.
        measures: figures.
        notes: what could not be told, and why.
    """

    format: Literal["graphopt.trace/1"] = VERSION
    model: str
    context: int
    stages: list[Stage] = []
    repeats: list[Repeat | int] = []
    folds: list[Fold] = []
    nodes: list[Node] = []
    weights: list[Weight] = []
    measures: list[Measure] = []
    notes: list[str] = []

    def totals(self) -> tuple[int, int]:
        """Return how many numbers the weights hold and in how many bytes; what is stored once counts once."""
        distinct = [weight for weight in self.weights if weight.same_as is None]
        return sum(weight.parameters for weight in distinct), sum(weight.bytes for weight in distinct)
