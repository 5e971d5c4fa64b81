"""Any other graph: pictures, sound, tables, parts of models. See :class:`graphopt.tasks.graph.task.GraphTask`."""

from graphopt.tasks.graph.task import GRAPH as GRAPH
from graphopt.tasks.graph.task import GraphTask as GraphTask
