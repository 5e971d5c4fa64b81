"""Events of onnxruntime's profile, and the nodes of the file that they stand for.

onnxruntime runs another graph than the file holds: nodes are fused, folded, and bodies of operators inlined. Its names
are joined with those of the file by what they make: a value that keeps its name names the node that made it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphopt.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    import onnx_ir as ir

_KERNEL = "_kernel_time"


@dataclass(frozen=True)
class Event:
    """One kernel that ran.

    Attributes:
        node: the name of the node that onnxruntime ran.
        operator: its type.
        provider: onnxruntime's name for what computed it.
        start: in microseconds.
        duration: likewise.
    """

    node: str
    operator: str
    provider: str
    start: int
    duration: int


def read_events(file: Path) -> tuple[list[list[Event]], list[int]]:
    """Read a profile: the kernels of each run of the model, in order, and what each run took, in microseconds.

    Raises:
        InputError: it is no profile.
    """
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
        kernels = [
            Event(
                event["name"].removesuffix(_KERNEL),
                event["args"].get("op_name", "?"),
                event["args"].get("provider", "?"),
                event["ts"],
                event["dur"],
            )
            for event in entries
            if event.get("cat") == "Node" and event["name"].endswith(_KERNEL)
        ]
        runs = [(event["ts"], event["dur"]) for event in entries if event["name"] == "model_run"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"the profile of onnxruntime cannot be read: {error}", file=file) from error
    if not runs:
        raise InputError("the profile of onnxruntime holds no run of the model", file=file)
    runs.sort()
    kernels.sort(key=lambda event: (event.start, -event.duration))
    return list(_by_run(list(_outer(kernels)), runs)), [duration for _, duration in runs]


def _outer(kernels: Sequence[Event]) -> Iterator[Event]:
    """Yield events that lie in no other: a branch or a loop takes the time of the nodes inside."""
    end = 0
    for event in kernels:
        if event.start + event.duration > end or not event.duration:
            yield event
            end = max(end, event.start + event.duration)


def _by_run(kernels: Sequence[Event], runs: Sequence[tuple[int, int]]) -> Iterator[list[Event]]:
    index = 0
    for start, duration in runs:
        while index < len(kernels) and kernels[index].start < start:
            index += 1
        begin = index
        while index < len(kernels) and kernels[index].start <= start + duration:
            index += 1
        yield list(kernels[begin:index])


def origins(file: ir.Graph, runtime_graph: ir.Graph) -> Mapping[str, str]:
    """Return, for the name of each node that onnxruntime runs, the name of the node of the file that it stands for.

    A fused node makes the value that the last of its nodes made. A node of an inlined body makes values that the file
    does not know: it stands for what makes, in the file, that input of its reader, or for what its reader stands for.
    What leads nowhere keeps its own name.
    """
    makers = {value.name: node.name or "" for node in file for value in node.outputs if value.name}
    nodes = {node.name: node for node in file if node.name}
    by_node: dict[ir.Node, str] = {}
    for node in reversed(list(runtime_graph)):
        origin = next((makers[value.name] for value in node.outputs if value.name in makers), None)
        if not origin:
            origin = node.name if node.name in nodes else _origin_of_readers(node, nodes, by_node)
        if origin is not None:
            by_node[node] = origin
    return {node.name or "": origin for node, origin in by_node.items()}


def _origin_of_readers(node: ir.Node, nodes: Mapping[str, ir.Node], origins: Mapping[ir.Node, str]) -> str | None:
    """Return the node of the file that an unknown node stands for, by what reads its outputs.

    Args:
        node: that onnxruntime runs.
        nodes: of the file, by name.
        origins: of the nodes behind it.
    """
    uses = [use for value in node.outputs for use in value.uses()]
    for use in uses:
        maker = _maker_of_input(nodes.get(use.node.name or ""), use.idx)
        if maker is not None:
            return maker
    return next((origins[use.node] for use in uses if use.node in origins), None)


def _maker_of_input(reader: ir.Node | None, index: int) -> str | None:
    """Return the name of the node that makes an input of a node of the file."""
    value = None if reader is None or index >= len(reader.inputs) else reader.inputs[index]
    maker = None if value is None else value.producer()
    return None if maker is None else maker.name
