"""The few ways in which a graph is changed: put nodes in place of others, put a node between two, share a constant.

    old -> [new, ..., new]        replace          name, type, shape, readers, graph outputs and history are kept
    value -> node -> readers      insert_behind    all readers, or some
    value -> node -> reader       insert_in_front  one input of one reader
    constant                      shared_constant  one initializer for all that ask for the same array

What a change means is written into the ledger by the pass that makes it.
"""

from graphopt.graph.editing.builders import Dims, Inserter, clone_node, free_name, shared_constant
from graphopt.graph.editing.insertion import insert_behind, insert_in_front, name_output
from graphopt.graph.editing.replacement import bypass, drop, inherit, remove, replace, take_place

__all__ = [
    "Dims",
    "Inserter",
    "bypass",
    "clone_node",
    "drop",
    "free_name",
    "inherit",
    "insert_behind",
    "insert_in_front",
    "name_output",
    "remove",
    "replace",
    "shared_constant",
    "take_place",
]
