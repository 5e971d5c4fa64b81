"""Why a basis cannot be rotated by changing weights alone: the reasons that the rules of the analysis give."""

from __future__ import annotations

from graphopt.graph.diagnostics import Rule

COORDINATES_OBSERVED = Rule("basis.observed", "{op} looks at single coordinates, or is not followed by the analysis")
CONSTANT = Rule("basis.constant", "a constant that is no weight of a product")
PORT = Rule("basis.port", "it is a {port}, known to the app")
READ_BY_SUBGRAPH = Rule("basis.captured", "a subgraph of {op} reads it")

COORDINATE_BY_COORDINATE = Rule("basis.coordinate-by-coordinate", "{op} works on it coordinate by coordinate")
CHOSEN_BY_WHERE = Rule("basis.chosen", "Where chooses its coordinates one by one")
SAME_ADDED = Rule("basis.same-number-added", "the same number is added along it")
NUMBER_ADDED = Rule("basis.number-added", "a number is added to every coordinate")

GAIN = Rule("basis.gain", "the norm has a gain of its own, which fold_norms could not move into weights")
NORM_SPANS_MORE = Rule("basis.norm-spans-more", "the norm spans more than the last axis")
MEAN = Rule("basis.mean", "LayerNormalization takes a mean over it, which fold_norms could not move into weights")

RANK_UNKNOWN = Rule("basis.rank-unknown", "an online rotation of a tensor whose rank is not known")
ROTATION_READS = Rule("basis.rotation-reads", "an online rotation reads it")
ROTATED_ONLINE = Rule("basis.rotated", "it is rotated online already")

CONSTANT_LEFT = Rule("basis.constant-left", "MatMul of a constant on its left, or of tensors whose rank is not known")
STACK_OF_MATRICES = Rule("basis.stacked", "MatMul with a stack of constant matrices")
ENTRY_BY_ENTRY = Rule("basis.paired", "MatMul pairs its entries one by one")
CODES = Rule("basis.codes", "its codes are fixed: rotate before weights are quantized")
ROUNDED_INPUT = Rule(
    "basis.rounded", "its numbers are rounded in these coordinates: rotate before inputs are quantized"
)
PICKED_ENTRIES = Rule("basis.picked", "{op} picks or sums its entries")

MIXED_AXES = Rule("basis.mixed", "{op} mixes it with other axes")
COPIES = Rule("basis.copies", "Expand fills it with copies")
CUT_UNKNOWN = Rule("basis.cut-unknown", "{op} cuts it where the graph does not say")
SINGLE_ENTRIES = Rule("basis.single-entries", "Slice takes single entries of it")
PART_OF_CONCAT = Rule("basis.beside", "Concat puts it beside other coordinates")
MADE_OF_PARTS = Rule("basis.made-of-parts", "Concat makes it of parts")
CUT_OTHERWISE = Rule("basis.cut-otherwise", "other nodes take the same axis apart in another way")
PARTS_OBSERVED = Rule("basis.parts-observed", "{op} makes it of parts that {observer} observes")
NOT_CONTIGUOUS = Rule("basis.apart", "its coordinates do not lie side by side in the weight of {reader}")

HEAD_BY_HEAD = Rule("basis.head-by-head", "each head attends for itself")
POSITION_BY_POSITION = Rule("basis.position-by-position", "each head and position attends for itself")
WEIGHS_VALUES = Rule(
    "basis.weighs-values", "{op} weighs values by it: a state of rotated keys and of rotated values is not followed"
)
SOFTMAX = Rule("basis.softmax", "attention scores are softmaxed")
HEAD_SIZE_UNKNOWN = Rule("basis.head-size-unknown", "the size of its heads is not known")
ROTARY_ANGLES = Rule("basis.turned", "RotaryEmbedding turns each pair of its coordinates by another angle")
