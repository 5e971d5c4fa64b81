"""What kinds of models there are: one file or folder here is one kind. See :class:`Task`."""

from graphopt.tasks.base import Call, Probe, Task
from graphopt.tasks.registry import TASKS, task_of, task_of_ports

__all__ = ["TASKS", "Call", "Probe", "Task", "task_of", "task_of_ports"]
