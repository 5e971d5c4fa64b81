"""The tasks by name, and which of them a graph is of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphopt.tasks.base import Task
from graphopt.tasks.ports import port_of_value
from graphopt.util.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Collection

    import onnx_ir as ir

TASKS: Registry[Task] = Registry(
    "graphopt.tasks",
    kind="task",
    name_of=lambda member: member.name if isinstance(member, Task) else None,
    order=lambda tasks: dict(sorted(tasks.items(), key=lambda item: item[1].is_fallback)),
)
"""The tasks by name, in the order in which a graph's ports are tried, the fallback last."""


def task_of_ports(inputs: Collection[str], outputs: Collection[str]) -> Task:
    """Return the kind of model that has such inputs and outputs: their names, or the ports by name.

    A graph of no known kind is of the task ``graph``.
    """
    matches = (task for task in TASKS.values() if task.is_fallback or task.matches(inputs, outputs))
    return next(matches)


def task_of(graph: ir.Graph) -> Task:
    """Return the kind of model that ``graph`` is, by its inputs and outputs: see :func:`task_of_ports`."""
    ports = (map(port_of_value, values) for values in (graph.inputs, graph.outputs))
    return task_of_ports(*({port.name: port for port in side} for side in ports))
