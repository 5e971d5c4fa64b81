"""The few ways in which a graph is changed: put nodes in place of others, put a node between two, share a constant.

    old -> [new, ..., new]        replace          name, type, shape, readers, graph outputs and history are kept
    value -> node -> readers      insert_behind    all readers, or some
    value -> node -> reader       insert_in_front  one input of one reader
    constant                      shared           one initializer for all that ask for the same array

What a change means is written into the ledger by the pass that makes it.
"""

from graphopt.graph.editing.builders import Dims, Inserter, free_name, like, shared
from graphopt.graph.editing.insertion import insert_behind, insert_in_front, name_output
from graphopt.graph.editing.replacement import bypass, drop, inherit, remove, replace, take_place

__all__ = [
    "Dims",
    "Inserter",
    "bypass",
    "drop",
    "free_name",
    "inherit",
    "insert_behind",
    "insert_in_front",
    "like",
    "name_output",
    "remove",
    "replace",
    "shared",
    "take_place",
]
