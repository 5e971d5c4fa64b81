"""What kinds of models there are. A new one is one module here and one entry in :data:`TASKS`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphopt.tasks.base import Call, Probe, Task, TaskName
from graphopt.tasks.causal_lm import CausalLM
from graphopt.tasks.encoder import Encoder

if TYPE_CHECKING:
    from collections.abc import Collection

    import onnx_ir as ir

TASKS: dict[str, Task] = {task.name: task for task in (CausalLM(), Encoder())}
"""The tasks by name, in the order in which a graph's ports are tried."""


def task_of_ports(inputs: Collection[str], outputs: Collection[str]) -> Task:
    """Return the kind of model that has such inputs and outputs.

    A graph of no known kind counts as a causal language model, whose own check then says what it lacks.
    """
    return next((task for task in TASKS.values() if task.matches(inputs, outputs)), TASKS[CausalLM.name])


def task_of(graph: ir.Graph) -> Task:
    """Return the kind of model that ``graph`` is, by the names of its inputs and outputs: see :func:`task_of_ports`."""
    return task_of_ports(*([value.name or "" for value in ports] for ports in (graph.inputs, graph.outputs)))


__all__ = ["TASKS", "Call", "Probe", "Task", "TaskName", "task_of", "task_of_ports"]
