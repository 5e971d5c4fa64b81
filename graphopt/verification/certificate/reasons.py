"""What the checker says of a place: the evidence that it holds, or what is wrong with it."""

from __future__ import annotations

from graphopt.graph.diagnostics import Rule

# What is right.
MATRIX_HOLDS = Rule(
    "certificate.matrix-holds",
    "on {vectors} random vectors it is its original times its maps, to {ratio:.2g} of what rounding explains; "
    "a row off by {visible:.1e} of its length passes with probability below 1e-6",
)
ENTRIES_HOLD = Rule(
    "certificate.entries-hold",
    "each entry is that of its original times its map, to {ratio:.2g} of what rounding explains",
)
HADAMARD_HOLDS = Rule(
    "certificate.hadamard-holds", "H H^T = n I holds in integers for its matrices, of order {orders:and}"
)

# What is not looked at here.
FOREIGN_BODY = Rule(
    "certificate.foreign-body",
    "the body that the file gives it is not the operator's own, and what it computes is not looked at here",
)
ROUNDING_UNKNOWN = Rule(
    "certificate.rounding-unknown",
    "a rotated weight of type {dtype} cannot be compared: its rounding is not known here",
)

# The two graphs beside one another.
NOT_LISTED = Rule("certificate.not-listed", "{failures} failures from here on are not listed")
CLAIM_OF_NOTHING = Rule("certificate.claim-of-nothing", "no computed tensor has this name")
CLAIM_REFUSED = Rule("certificate.claim-refused", "{error}")
VERSION = Rule("certificate.version", "version {old} of the operators of {domain} became {new}")
BODY = Rule("certificate.body", "the body of the operator {domain}::{op} is not what it was")
OPERATOR = Rule("certificate.operator", "it is {op}, before it was {before}")
OUTPUTS = Rule("certificate.outputs", "it has {outputs} outputs, before it had {before}")
ATTRIBUTE = Rule("certificate.attribute", "attribute {attribute} is not what it was")
NODE_NEW = Rule("certificate.node-new", "it is not in the graph before")
NODE_GONE = Rule("certificate.node-gone", "the graph after does not have this node, which outputs are computed from")
INPUT_NEW = Rule("certificate.input-new", "the graph before has no such input")
INPUT_GONE = Rule("certificate.input-gone", "the graph after has no such input")
INPUT_TYPE = Rule("certificate.input-type", "type or shape of this input are not what they were")
INPUT_DEFAULT = Rule("certificate.input-default", "this input has a default in one of the graphs only")
INPUT_ROTATED = Rule(
    "certificate.input-rotated", "it is claimed to be rotated, but it is no cache that comes out again"
)
OUTPUT_NEW = Rule("certificate.output-new", "the graph before has no such output")
OUTPUT_GONE = Rule("certificate.output-gone", "the graph after has no such output")
OUTPUT_OTHER = Rule("certificate.output-other", "it does not stand for the output of this name")
OUTPUT_ROTATED = Rule("certificate.output-rotated", "this output is left in rotated coordinates")
CACHE_TURNED = Rule("certificate.cache-turned", "the cache goes in and comes out in different coordinates")
NOT_AS_CLAIMED = Rule("certificate.not-as-claimed", "it does not come out in the coordinates that are claimed")
READS_OTHER = Rule("certificate.reads-other", "it stands for {stands}, but the node before reads {before}")
STANDS_FOR_NONE = Rule(
    "certificate.stands-for-none", "it stands for nothing known yet, but the node before reads {before}"
)
ONE_HAS_INPUT = Rule("certificate.one-has-input", "input {input} is there in one of the graphs only")
ONE_CONSTANT = Rule("certificate.one-constant", "input {input} is a constant in one of the graphs only")

# Constants.
CONSTANT_CHANGED = Rule("certificate.changed", "it is not what it was, and nothing says that it should be rotated here")
OTHER_TENSOR = Rule("certificate.other-tensor", "it was {dtype} {shape!r} before")
NOT_ROTATED = Rule(
    "certificate.unchanged",
    "it is unchanged, but it should be rotated: row {row} is off by {ratio:.1e} times what rounding explains",
)
NOT_ITS_ORIGINAL = Rule(
    "certificate.not-its-original",
    "it is not its original times its maps: row {row} is off by {ratio:.1e} times what rounding explains",
)

# What an operator does to coordinates.
NOT_FOLLOWED = Rule("certificate.not-followed", "{op} looks at single coordinates, or is not followed here")
SINGLE_COORDINATES = Rule("certificate.single-coordinates", "{op} looks at single coordinates")
SHAPES_DO_NOT_FIT = Rule("certificate.shapes-do-not-fit", "its shapes do not fit the coordinates: {error}")
SHAPE_UNKNOWN = Rule("certificate.shape-unknown", "the graph does not state the shape of {tensor}")
OTHER_SHAPE = Rule("certificate.other-shape", "output {output} has another shape than its coordinates, {shape!r}")
CUTS_THROUGH = Rule("certificate.cuts-through", "it cuts through coordinates that a rotation mixes")

ADDS_DIFFERENT = Rule("certificate.adds-different", "it adds tensors in different coordinates, {tensors:and}")
SCALES_MIXED = Rule(
    "certificate.scales-mixed", "{tensor} scales the coordinates that a rotation mixes by different numbers"
)
OTHER_AXIS = Rule("certificate.other-axis", "it does not normalise over the axis that is rotated, and that alone")
GAIN = Rule(
    "certificate.gain",
    "its gain was not folded into the weights behind it: it scales rotated coordinates one by one",
)
MEAN = Rule(
    "certificate.mean",
    "it subtracts a mean over rotated coordinates: the mean was not folded into the weights before it",
)
CONDITION = Rule("certificate.condition", "its condition is in rotated coordinates, or has no stated shape")
CHOOSES_AMONG = Rule("certificate.chooses-among", "it chooses among the coordinates that a rotation mixes one by one")
CHOOSES_BETWEEN = Rule("certificate.chooses-between", "it chooses between tensors in different coordinates")
SUM_AXES = Rule("certificate.sum-axes", "it adds up along axes that are not constant")
SUM_DIFFERENT = Rule("certificate.sum-different", "it adds up what is in different coordinates")
SPREAD = Rule("certificate.spread", "{tensor} is spread over rotated coordinates")

STACKED_WEIGHT = Rule("certificate.stacked", "its constant has {axes} axes, only matrices are followed")
LOOKS_UP = Rule("certificate.looks-up", "it looks up coordinates that are rotated, or looks up by them")
LOOKS_UP_BY = Rule("certificate.looks-up-by", "it looks up by rotated coordinates, or by indices of unknown shape")
BATCH_DIMS = Rule("certificate.batch-dims", "it looks up batch by batch, which is not followed here")
VECTOR = Rule("certificate.vector", "a product with a vector in rotated coordinates")
SIDES_DIFFER = Rule(
    "certificate.sides-differ", "the axis that is summed over is in different coordinates on its two sides"
)
SIDES_NOT_SAME = Rule(
    "certificate.sides-not-same", "the axis that is summed over is not in the same coordinates on its two sides"
)
POSITIONS_DIFFER = Rule("certificate.picks-among", "it picks among positions that are in different coordinates")
ROWS_DIFFER = Rule(
    "certificate.rows-differ", "the coordinates that its weight {verb} are not the same for each row of {width}"
)

RESHAPE = Rule("certificate.reshape", "a reshape from {shape} to {target} cannot be followed")
EXPANSION = Rule("certificate.expansion", "an expansion to {target} cannot be followed")
INDICES = Rule("certificate.indices", "its shape or indices are in rotated coordinates")
SPLIT = Rule("certificate.split", "a split along an axis of unknown size")
SLICE_AXES = Rule("certificate.slice-axes", "a slice along axes that are not constant")
SLICE_PLACES = Rule("certificate.slice-places", "a slice of rotated coordinates at places that are not constant")
PUT_BEHIND = Rule("certificate.put-behind", "it puts tensors in different coordinates one behind the other")
JOINS_SHAPES = Rule("certificate.joins-shapes", "it joins tensors of different shapes")
CAST = Rule("certificate.cast", "it turns rotated coordinates into another type than floating point")

WEIGHS_VALUES = Rule("certificate.weighs-values", "{tensor} weighs values, and is in rotated coordinates")
MASK = Rule("certificate.mask", "its mask or its lengths are in rotated coordinates")
GROUPS = Rule("certificate.groups", "{queries} query heads do not share {keys} key and {values} value heads")
HEADS_DIFFER = Rule(
    "certificate.heads-differ",
    "query head {query} and key head {key} are in different coordinates, {queries} and {keys}",
)
PAST_DIFFERS = Rule("certificate.past-differs", "the past {what} {past} are in other coordinates than the new ones")
TOKENS_DIFFER = Rule("certificate.tokens-differ", "positions of {tensor} are in different coordinates")
HEADS_MIXED = Rule("certificate.heads-mixed", "a rotation of {tensor} mixes heads")
HEADS_UNKNOWN = Rule("certificate.heads-unknown", "the graph does not state how many heads {tensor} has")

HADAMARD_PORTS = Rule(
    "certificate.hadamard-ports", "it should have an input, two matrices, one output and no attributes"
)
HADAMARD_TYPE = Rule("certificate.hadamard-type", "its matrix is no constant of type int8")
NO_HADAMARD = Rule("certificate.no-hadamard", "it is no Hadamard matrix: {error}")
HADAMARD_WIDTH = Rule(
    "certificate.hadamard-width", "it rotates {width} coordinates at once, of a tensor of shape {shape}"
)
ROTATED_ALREADY = Rule("certificate.rotated-already", "what it rotates is in rotated coordinates already")
STANDS_FOR_NOTHING = Rule("certificate.stands-for-nothing", "it rotates a tensor that stands for nothing known")
