"""A model is traced by two layers of each kind, and its weights are bound to the graph by name; none is read.

    short_trace.py     the trace, whole or by a few layers, and its weights
    skeleton.py        a model whose parameters take no memory
    recording.py       what each layer computes, operation by operation
    kinds.py           which layers are of one kind; the model with two of each
    relations.py       how each constant of the graph is made of parameters
    layer_of_node.py   which node belongs to which layer, and what layers pass on
    graph.py           the graph of a few layers becomes that of all
    symbols.py         dimensions that only one layer knows
    refusals.py        what keeps a model from that, as facts

Tracing takes minutes for a model of thirty layers, nearly all of which are the same.
"""

from graphopt.models.unrolling.short_trace import ALL_TRACED, WITH_WEIGHTS, bind, trace_loaded, trace_skeleton

__all__ = ["ALL_TRACED", "WITH_WEIGHTS", "bind", "trace_loaded", "trace_skeleton"]
