"""Where a node came from: the passes that made it, oldest first, what each did, what was checked, what it took."""

from __future__ import annotations

import difflib
import inspect
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from graphopt.analysis.structure.folding.trunk import constant_nodes
from graphopt.analysis.structure.token_cost import constants_of
from graphopt.errors import InputError
from graphopt.graph import provenance
from graphopt.graph.diagnostics import Check, Effect, Fact, Finding, PassReport
from graphopt.passes import PASSES
from graphopt.report.escape import plain
from graphopt.report.measurement import NodeMeasurement
from graphopt.report.sentences import sentence
from graphopt.report.trace import Node, SkipReason
from graphopt.report.trace_builder import open_model, trace_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from pathlib import Path

    import onnx_ir as ir

    from graphopt.artifact.manifest import Manifest

_HINTS = 3
LIST_LENGTH = 8
"""Names of a list that are shown, by default."""


class Edge(BaseModel):
    """One step on the way from the model as it came in to a node.

    Attributes:
        stage: the pass.
        run: which of its runs, from 1; 0 where no manifest tells.
        effect: what the pass declares of itself; ``None`` where that is not known.
        kind: what became of ``made``: ``edited`` in place, or ``made`` of others.
        made: the name of the node or weight behind the pass.
        sources: what it was made of.
        what: what the pass says of it.
        replaced: the nodes that it took the place of, with their operators.
        checks: what was proved or measured after the pass, without findings.
        findings: what a check says of this node.
        seconds: how long the pass took for the whole model.
    """

    model_config = ConfigDict(extra="forbid")

    stage: str
    run: int = 0
    effect: Effect | None = None
    kind: str
    made: str
    sources: list[str]
    what: list[Fact] = []
    replaced: list[str] = []
    checks: list[Check] = []
    findings: list[Finding] = []
    seconds: float | None = None


class Explanation(BaseModel):
    """Where a node came from.

    Attributes:
        node: what it is now.
        call: what it computes, in one line.
        origins: the nodes and weights of the model as it came in that it leads back to.
        as_it_came_in: whether no pass touched it.
        edges: the steps, oldest first.
        left: the passes that left it alone, and why.
        measured: its errors and its time, where they were asked for.
    """

    model_config = ConfigDict(extra="forbid")

    node: Node
    call: str
    origins: list[str]
    as_it_came_in: bool
    edges: list[Edge] = []
    left: list[SkipReason] = []
    measured: NodeMeasurement | None = None


def explain(path: Path, name: str) -> Explanation:
    """Say where the node ``name`` of a model came from; the name of a weight or value stands for its reader or maker.

    Raises:
        InputError: there is no model, it cannot be read, or it has no such node; names those that are called alike.
    """
    model, manifest = open_model(path, weights=False)
    return explain_model(model, manifest, name)


def explain_model(model: ir.Model, manifest: Manifest | None, name: str) -> Explanation:
    """Say where a node came from; see :func:`explain`."""
    (only,) = explanations(model, manifest, [find_node(model.graph, name)])
    return only


def explanations(
    model: ir.Model, manifest: Manifest | None, nodes: Collection[ir.Node] | None = None
) -> Iterator[Explanation]:
    """Say where nodes of a model came from, in the order of the graph; all of them by default."""
    constant = constant_nodes(model.graph)
    trace = trace_of(model, manifest, "")
    for record, node in zip(trace.nodes, model.graph, strict=True):
        if nodes is None or node in nodes:
            yield _explanation(node, record, constant, manifest)


def _explanation(node: ir.Node, record: Node, constant: set[ir.Node], manifest: Manifest | None) -> Explanation:
    weights = [] if node in constant else constants_of(node, constant)
    items: list[ir.Node | ir.Value] = [node, *_makers(node, constant), *weights]
    histories = [(provenance.steps(item), item) for item in items]
    edges = {(step.pass_name, step.name, step.sources): step for steps, _ in histories for step in steps}
    origins: dict[str, None] = {}
    for steps, item in histories:
        if steps:
            origins.update(dict.fromkeys(provenance.history(item)[1]))
        elif item is node:
            origins[node.name or ""] = None
    names = [] if manifest is None else [report.name for report in manifest.passes]
    ordered_steps = sorted(
        edges.values(), key=lambda step: names.index(step.pass_name) if step.pass_name in names else -1
    )
    return Explanation(
        node=record,
        call=_call(node),
        origins=list(origins),
        as_it_came_in=not edges,
        edges=[_edge(step, manifest) for step in ordered_steps],
        left=record.left,
    )


def find_node(graph: ir.Graph, name: str) -> ir.Node:
    """Return the node of a name, the maker of a value, the first reader of a weight, or what came of one that is gone.

    Raises:
        InputError: there is none.
    """
    constant = constant_nodes(graph)
    tests: tuple[Callable[[ir.Node], bool], ...] = (
        lambda node: node.name == name,
        lambda node: any(value.name == name for value in node.outputs),
        lambda node: any(value is not None and value.name == name for value in node.inputs),
        lambda node: node not in constant and name in _names_in_record(node, constant),
    )
    for test in tests:
        for node in graph:
            if test(node):
                return node
    names = _suggestions(name, [node.name for node in graph if node.name and node not in constant])
    remedy = f"there are {', '.join(map(plain, names))}" if names else "`graphopt inspect MODEL --json` lists its nodes"
    raise InputError("the model has no node, value or weight of this name", node=plain(name), remedy=remedy)


def _names_in_record(node: ir.Node, constant: set[ir.Node]) -> set[str]:
    """Return the names that the record of a node and of what it is made of mentions."""
    items: list[ir.Node | ir.Value] = [node, *_makers(node, constant), *constants_of(node, constant)]
    return {name for item in items for step in provenance.steps(item) for name in (step.name, *step.sources)}


def _suggestions(name: str, names: list[str]) -> list[str]:
    """Return names that hold ``name``, or something like it."""
    parts = {part for candidate in names for part in (candidate, *candidate.split("."))}
    matches = [candidate for candidate in names if name in candidate]
    for part in difflib.get_close_matches(name, sorted(parts), _HINTS) if not matches else ():
        matches += [candidate for candidate in names if part in candidate and candidate not in matches]
    return matches[:_HINTS]


def rewrite_of(name: str) -> str:
    """Return the before and after of a pass, as its docstring has it; "" for a pass that this version lacks."""
    doc = inspect.getdoc(PASSES[name]) if name in PASSES else None
    _, before, tail = (doc or "").partition("\n\nAttributes:\n")[0].partition("before")
    lines = (before + tail).replace("``", "").splitlines()
    last = max((number for number, line in enumerate(lines) if line.startswith("    ")), default=-1)
    return "\n".join(line if line.startswith(" ") else line.replace("::", ":") for line in lines[: last + 1])


def _makers(node: ir.Node, constant: set[ir.Node]) -> list[ir.Node]:
    makers: list[ir.Node] = []
    waiting = [] if node in constant else [value.producer() for value in node.inputs if value is not None]
    while waiting:
        producer = waiting.pop()
        if producer is not None and producer in constant and producer not in makers:
            makers.append(producer)
            waiting += [value.producer() for value in producer.inputs if value is not None]
    return makers


def _edge(step: provenance.HistoryStep, manifest: Manifest | None) -> Edge:
    is_edit = not step.sources or step.sources == (step.name,)
    edge = Edge(
        stage=step.pass_name,
        kind="edited" if is_edit else "made",
        made=step.name,
        sources=list(step.sources),
    )
    report = None if manifest is None else _report(step, manifest)
    if report is None or manifest is None:
        return edge
    names = {step.name, *step.sources}
    checks = manifest.checks_of(report)
    return edge.model_copy(
        update={
            "run": report.run,
            "effect": report.effect,
            "what": [change.what for change in report.changes if change.where == step.name],
            "replaced": [f"{entry.where} ({entry.op_type})" for entry in report.removed if step.name in entry.by],
            "checks": [check.model_copy(update={"findings": []}) for check in checks],
            "findings": [entry for check in checks for entry in check.findings if {entry.node, entry.tensor} & names],
            "seconds": report.seconds,
        }
    )


def _report(step: provenance.HistoryStep, manifest: Manifest) -> PassReport | None:
    """Return the run of the pass that the step is of: the one that says so, or the first."""
    runs = [report for report in manifest.passes if report.name == step.pass_name]
    matches = (report for report in runs if any(change.where == step.name for change in report.changes))
    return next(matches, next(iter(runs), None))


def _call(node: ir.Node) -> str:
    arguments = [plain(value.name or "?", 40) if value is not None else "" for value in node.inputs]
    results = ", ".join(plain(value.name or "?", 40) for value in node.outputs)
    kind = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
    return f"{results} = {kind}({', '.join(arguments)})"


def summary_lines(explanation: Explanation, length: int | None = LIST_LENGTH) -> Iterator[str]:
    """Say it in lines, oldest step first; lists of names with at most ``length`` of them."""
    node = explanation.node
    position = "outside of layers" if node.layer is None else f"layer {node.layer}"
    yield f"{plain(node.name)}: {node.role}, {position}, run by {node.runner}"
    yield f"    {explanation.call}"
    yield f"came from: {_name_list(explanation.origins, length)}"
    if explanation.as_it_came_in:
        yield "no pass of graphopt made or edited it"
    stages = set[str]()
    for number, edge in enumerate(explanation.edges, 1):
        yield ""
        yield from _edge_lines(edge, number, length, is_first=edge.stage not in stages)
        stages.add(edge.stage)
    for skip in explanation.left:
        yield f"{skip.by} left it alone: {plain(sentence(skip.why), 240)}"


def _edge_lines(edge: Edge, number: int, length: int | None, *, is_first: bool) -> Iterator[str]:
    """Say one step in lines; the first step of a pass has its rewrite and its checks."""
    duration = "" if edge.seconds is None else f", {edge.seconds:.2f} s for the whole model"
    yield f"{number}. {edge.stage} ({edge.effect or 'effect unknown'}{duration})"
    sources = "" if edge.kind == "edited" else f" of {_name_list(edge.sources, length)}"
    yield f"   {edge.kind} {plain(edge.made)}{sources}"
    yield from (f"   {plain(sentence(change), 240)}" for change in edge.what)
    if edge.replaced:
        yield f"   in place of {_name_list(edge.replaced, length)}"
    if is_first:
        yield from (f"   | {line}".rstrip() for line in rewrite_of(edge.stage).splitlines())
        for check in edge.checks:
            figures = "".join(f", {name} {value:.3g}" for name, value in check.figures.items())
            yield f"   {check.name}: {check.status}: {plain(sentence(check.reason), 240)}{figures}"
    for finding in edge.findings:
        tensor = "" if finding.tensor is None else f" {plain(finding.tensor)}"
        yield f"   {finding.status}{tensor}: {plain(sentence(finding.reason), 240)}"


def _name_list(names: list[str], length: int | None) -> str:
    hidden = len(names[length:]) if length is not None else 0
    return ", ".join(map(plain, names[:length])) + (f" and {hidden} more" if hidden else "")
