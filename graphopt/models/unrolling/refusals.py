"""What keeps a model from being traced by a few of its layers, as facts."""

from __future__ import annotations

from graphopt.graph.diagnostics import Fact, Rule

FOLDED_WEIGHT = Rule("unroll.folded", "the exporter computes {weight} of {parameters} in a way that is not known")
RUNNING_VARIANCE = Rule("unroll.running-variance", "the exporter folds {buffer} and its like into weights")
NO_LAYERS = Rule("unroll.no-layers", "its modules hold no list of layers")
FEW_LAYERS = Rule("unroll.few-layers", "{traced} of its {layers} layers would be traced")
NOT_RECORDED = Rule("unroll.not-recorded", "it cannot be run without weights ({error})")
CROSSING = Rule("unroll.crossing", "layer {layer} reads more than what the layer before passes on")
OUTSIDE = Rule("unroll.outside", "what it computes around its layers depends on how many there are")
DIFFERENT = Rule("unroll.different", "layer {layer} does something else in a model of {layers} layers")
NODES = Rule("unroll.nodes", "layers {first} and {second} are of one kind and came out as different graphs ({what})")
PORTS = Rule("unroll.ports", "the caches of the graph are not in the order of the layers")
SUBGRAPHS = Rule("unroll.subgraphs", "{node} has a graph within")


class NotUnderstoodError(Exception):
    """The short way does not serve this model; the long way does.

    Args:
        reason: why, for the manifest.
    """

    def __init__(self, reason: Fact) -> None:
        super().__init__(str(reason))
        self.reason = reason
