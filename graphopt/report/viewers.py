"""Other viewers: files for Google's Model Explorer, and Netron, an optional package.

Model Explorer gets a graph with a folder for each layer, figures of nodes, and which node became which; Netron draws
every node of one graph and folds nothing.

The JSON is that of ``model_explorer.graph_builder`` and ``node_data_builder``; the mapping is ``SyncNavigationData``
of ``visualizer/common/sync_navigation.ts``, which the page "upload mapping from computer" takes.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from graphopt.errors import InputError, MissingDependencyError
from graphopt.report.trace_builder import BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from graphopt.report.trace import Diff, Node, Trace

GRAPH = "main"
"""The id of the graph; a file has one."""

_COLD, _HOT = "#ffffff", "#f87171"


def export(trace: Trace, folder: Path, before: Trace | None = None, difference: Diff | None = None) -> list[Path]:
    """Write ``graph.json`` and ``figures.json``; beside a model before also ``before.json`` and ``mapping.json``.

    Args:
        trace: of the model.
        folder: where the files go; it is made if it is not there.
        before: of what it was made from.
        difference: what is different between both.

    Raises:
        InputError: a file cannot be written.
    """
    files: dict[str, Any] = {"graph.json": graph(trace), "figures.json": figures(trace)}
    if before is not None and difference is not None:
        files |= {"before.json": graph(before), "mapping.json": mapping(before, trace, difference)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name).write_text(json.dumps(content), encoding="utf-8")
    except OSError as error:
        raise InputError(f"the files cannot be written: {error.strerror}", file=folder) from error
    return [folder / name for name in files]


def graph(trace: Trace) -> dict[str, Any]:
    """Return a model as a collection of one graph."""
    ids, measures = _ids(trace), defaultdict[str, dict[str, str]](dict)
    for measure in trace.measures:
        measures[measure.subject][measure.metric] = f"{measure.value:,.0f}"
    facts = [{**_facts(trace, node), **measures[node.name]} for node in trace.nodes]
    nodes = [
        {
            "id": ids[index],
            "label": node.role if node.role not in ("other", "shared") else node.operator,
            "namespace": "outside of layers" if node.layer is None else f"layer {node.layer}",
            "attrs": [{"key": key, "value": value} for key, value in facts[index].items()],
            "incomingEdges": [
                {"sourceNodeId": ids[maker], "sourceNodeOutputId": "0", "targetNodeInputId": str(number)}
                for number, maker in enumerate(node.reads)
            ],
        }
        for index, node in enumerate(trace.nodes)
    ]
    return {"label": trace.model, "graphs": [{"id": GRAPH, "nodes": nodes}]}


def figures(trace: Trace) -> dict[str, Any]:
    """Return bytes that each node reads for a token, as data that colour the graph."""
    ids = dict(zip((node.name for node in trace.nodes), _ids(trace), strict=True))
    values = {ids[measure.subject]: {"value": measure.value} for measure in trace.measures if measure.metric == BYTES}
    stops = [{"stop": 0, "bgColor": _COLD}, {"stop": 1, "bgColor": _HOT}]
    return {GRAPH: {"results": values, "gradient": stops}}


def mapping(before: Trace, after: Trace, difference: Diff) -> dict[str, Any]:
    """Return which node became which; nodes that were kept have the same name in both, which is enough there.

    Where several became one, each leads to it; where one became several, it leads to the first.
    """
    first, second = (
        dict(zip((node.name for node in model_trace.nodes), _ids(model_trace), strict=True))
        for model_trace in (before, after)
    )
    pairs = {
        first[old]: second[edge.after[0]]
        for edge in difference.edges
        for old in edge.before
        if edge.after and old in first and edge.after[0] in second
    }
    return {"type": "sync_navigation", "mapping": pairs}


def _ids(trace: Trace) -> list[str]:
    """Return the name of each node, with its place where it has none or shares it."""
    times = Counter(node.name for node in trace.nodes)
    return [
        node.name if node.name and times[node.name] == 1 else f"{node.name}#{index}"
        for index, node in enumerate(trace.nodes)
    ]


def _facts(trace: Trace, node: Node) -> Mapping[str, str]:
    weights = [trace.weights[number] for number in node.weights]
    facts = {
        "operator": node.operator,
        "role": node.role,
        "run by": node.runner,
        "computes in": node.computes or "",
        "weights": "; ".join(
            f"{weight.name}: {weight.format} {weight.shape}, {weight.bytes:,} bytes" for weight in weights
        ),
        "passes": ", ".join(node.passes),
    }
    return {key: value for key, value in facts.items() if value}


def open_netron(model: Path, port: int = 0, *, browser: bool = True) -> None:
    """Serve the graph of ``model`` with Netron until Ctrl-C.

    Args:
        model: an artifact, or an .onnx file.
        port: 0 lets Netron choose.
        browser: whether to open it in a browser.

    Raises:
        InputError: there is no model.
        MissingDependencyError: Netron is not installed.
    """
    file = model / "model.onnx" if model.is_dir() else model
    if not file.is_file():
        raise InputError("there is no ONNX model here", file=model, remedy="give an artifact, or an .onnx file")
    try:
        import netron
    except ImportError as error:
        raise MissingDependencyError("Netron is not installed", remedy="pip install netron") from error
    netron.start(str(file), address=("127.0.0.1", port) if port else None, browse=browser)
    netron.wait()
