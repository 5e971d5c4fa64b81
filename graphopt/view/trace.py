"""The data model behind ``inspect``, ``explain`` and their JSON: what a model consists of, and how it came to be.

A trace has stages, one for each pass that ran; nodes and weights of the model as it is; folds, which say what of it is
the same; edges, which lead from a node back to what it was made from; and measures. Everything is found by its place in
a list, or by the name of a node.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from graphopt.facts import Check, Effect, Fact

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


class Left(_Part):
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
    weights: list[int] = []
    computes: str | None = None
    runner: str = "onnxruntime"
    passes: list[str] = []
    left: list[Left] = []


class Weight(_Part):
    """A tensor that the file stores.

    Attributes:
        name: as the file has it.
        format: what its numbers are stored in, such as ``int4``; ``scales`` for what belongs to codes.
        group: how many numbers share a scale, ``None`` where that is not known or does not apply.
        shape: as it is stored.
        parameters: how many numbers of the model it holds; 0 for scales.
        bytes: as it is stored.
    """

    name: str
    format: str
    group: int | None
    shape: list[int]
    parameters: int
    bytes: int


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
