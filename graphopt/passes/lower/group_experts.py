"""The products of all experts of a mixture become one node, which sorts tokens by expert itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
import onnx_ir as ir

from graphopt.analysis.structure.contrib import contrib_nodes
from graphopt.analysis.structure.experts import Mixture, mixtures_of
from graphopt.graph.diagnostics import Effect, Fact, Rule
from graphopt.graph.editing import Inserter, clone_node, name_output, replace, shared_constant
from graphopt.graph.weights import WeightTensor, expression_of, new_weight, weight_of
from graphopt.graph.weights.rearrangement import stack
from graphopt.passes.base import Pass
from graphopt.passes.common.sorted_rows import expert_of_rows, restore_order
from graphopt.runtime_ops import DOMAIN
from graphopt.runtime_ops.hadamard.spec.op import HADAMARD
from graphopt.runtime_ops.matmul_experts.spec.op import MATMUL_EXPERTS
from graphopt.runtime_ops.matmul_table.spec.op import MATMUL_TABLE
from graphopt.runtime_ops.matmul_table.spec.packing import TILE
from graphopt.runtime_ops.schema import attributes_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from graphopt.passes.context import Context, Ledger
    from graphopt.passes.recipe import Recipe

ONE_NODE = Rule("group_experts.grouped", "{experts} experts in one node, which reads the weights of each once")
SUM = Rule("group_experts.summed", "experts of {formats} formats: each node gives zeros for the experts of others")
ROTATION = Rule("group_experts.rotated", "rows of all experts rotated at once")
NOT_PACKED = Rule("group_experts.not-packed", "the product of expert {expert} is {op_type}, not MatMulTable")
OTHER_STEPS = Rule(
    "group_experts.other-steps", "rows of its experts go through different nodes in front of the products"
)
NO_BOUNDS = Rule("group_experts.no-bounds", "where the rows of each expert end is not one vector")
OTHER_SIZES = Rule("group_experts.other-sizes", "its experts have matrices of different sizes")
SHORT_TILE = Rule(
    "group_experts.short-tile",
    "experts of a trellis with {columns} columns, no multiple of {tile}, stay products of their own",
)

_OF_EXPERTS = ("codes", "scales", "zero_points", "bias")


class _Stack(NamedTuple):
    """Experts of one format."""

    experts: list[int]
    products: list[ir.Node]


class GroupExperts(Pass):
    """Let one node multiply the rows of all experts.

    before, with rows of x sorted by expert::

        y = Concat(MatMulTable(Gather(x, Range(0, end_0)), W_0), MatMulTable(Gather(x, Range(end_0, end_1)), W_1), ...)

    after::

        y = MatMulExperts(x, W, experts)         W[e] = W_e, experts[r] = the number of ends that are r or less

    Row r of the first y is in the part of the first expert whose end is beyond r, which the second says; both multiply
    by the same codes, in integer modes with the same bits. Experts of several formats make a node for each, added up: a
    row whose expert is not in a node has the expert -1 there, and zeros.

    Where a sort of the routers' choices made the order, what it sorted and put back stays where it is::

        x = GatherND(t, perm / top)    y = MatMulExperts(x, W, sorted)    z = GatherND(f(y, GatherND(w, perm)), inverse)
        z = f(MatMulExperts(t, W, choices), w)

    as f treats rows one by one. perm, inverse and ends are known by what they compute: the nodes that make them are
    run on permutations.

    A recipe for ``ort-cpu`` that makes codes gets this step where a model has such products.
    """

    name: ClassVar[str] = "group_experts"
    effect: ClassVar[Effect] = "exact"
    after: ClassVar[tuple[str, ...]] = ("lower",)

    @classmethod
    def is_needed(cls, graph: ir.Graph, recipe: Recipe) -> bool:
        """Return whether a graph has such products, and the recipe makes codes of weights for CPUs."""
        is_for_cpus = recipe.options_of("lower").get("target") == "ort-cpu"
        # `unfuse_experts` writes such products of onnxruntime's own.
        has_mixtures = bool(mixtures_of(graph)) or bool(contrib_nodes(graph, "QMoE"))
        return is_for_cpus and bool(recipe.phases & {"codes", "lower"}) and has_mixtures

    def rewrite(self, model: ir.Model, context: Context) -> None:
        """Group the experts of each mixture; say why others stay."""
        graph, ledger = model.graph, context.ledger
        nodes: list[ir.Node] = []
        for mixture in mixtures_of(graph):
            stacks = _stacks(mixture)
            if isinstance(stacks, Fact):
                ledger.skipped(mixture.concat, stacks)
                continue
            experts = expert_of_rows(model, mixture, context.runner)
            if isinstance(experts, Fact):
                ledger.skipped(mixture.concat, experts)
                continue
            nodes += _group(graph, mixture, stacks, experts, ledger)
        restore_order(model, nodes, context)


def _stacks(mixture: Mixture) -> list[_Stack] | Fact:
    """Return the experts of each format, or why they stay as they are."""
    if mixture.bounds is None:
        return NO_BOUNDS()
    sizes: set[tuple[int, int]] = set()
    stacks: dict[Hashable, _Stack] = {}
    steps = {tuple(map(_kind_of_step, steps)) for steps in mixture.steps}
    if len(steps) != 1 or None in next(iter(steps)):
        return OTHER_STEPS()
    for expert, product in enumerate(mixture.products):
        if (product.domain, product.op_type) != (DOMAIN, MATMUL_TABLE.name):
            return NOT_PACKED(expert=expert, op_type=product.op_type)
        attributes = attributes_of(product)
        sizes.add((attributes["rows"], attributes["columns"]))
        if attributes.get("trellis") and attributes["columns"] % TILE:
            return SHORT_TILE(columns=attributes["columns"], tile=TILE)
        members = stacks.setdefault(_format_of(product), _Stack([], []))
        members.experts.append(expert)
        members.products.append(product)
    return list(stacks.values()) if len(sizes) == 1 else OTHER_SIZES()


def _kind_of_step(node: ir.Node) -> Hashable:
    """Return what a node does to rows besides its first input; ``None`` where it is no rotation by constants."""
    if (node.domain, node.op_type) != (DOMAIN, HADAMARD.name) or len(node.outputs[0].uses()) != 1:
        return None
    return tuple(value.name for value in node.inputs[1:] if value is not None)


def _format_of(product: ir.Node) -> Hashable:
    """Return what experts of one node have in common: attributes, types, tables and absent inputs."""
    kind: list[Hashable] = [*sorted(attributes_of(product).items())]
    for port, value in zip(MATMUL_TABLE.schema.inputs[1:], product.inputs[1:], strict=True):
        assert value is not None and value.const_value is not None
        is_alike = port.name not in _OF_EXPERTS or port.is_absent(value)
        kind += [value.name if is_alike else (value.dtype, tuple(value.const_value.shape.numpy()))]
    return tuple(kind)


def _group(
    graph: ir.Graph, mixture: Mixture, stacks: Sequence[_Stack], experts: ir.Value, ledger: Ledger
) -> list[ir.Node]:
    concat, old, nodes = mixture.concat, mixture.concat.outputs[0], []
    name = concat.name or "experts"
    x = mixture.rows
    for step in mixture.steps[0]:
        rotation = clone_node(step, [x, *step.inputs[1:]], f"{name}.{step.op_type}")
        graph.insert_before(concat, rotation)
        x = name_output(rotation, mixture.rows)
        ledger.changed(rotation, ROTATION(), [steps[0] for steps in mixture.steps])
    insert = Inserter(graph, concat, name)
    for number, members in enumerate(stacks):
        of_node = experts
        if len(stacks) > 1:
            members_of = np.full(len(mixture.products), -1, np.int64)
            members_of[members.experts] = np.arange(len(members.experts))
            table = shared_constant(graph, f"{name}.places{number}", members_of)
            of_node = insert.op("Gather", [table, experts], experts.shape, ir.DataType.INT64, f"places{number}")
        node = MATMUL_EXPERTS.node(
            [x, *_inputs(graph, members), of_node],
            attributes_of(members.products[0]),
            name=f"{name}.experts{number or ''}",
        )
        graph.insert_before(concat, node)
        name_output(node, old)
        sources = [
            value for product in members.products for value in (product, *product.inputs[1:3]) if value is not None
        ]
        ledger.changed(node, ONE_NODE(experts=len(members.experts)), sources)
        nodes.append(node)
    total = nodes[0].outputs[0]
    for number, node in enumerate(nodes[1:]):
        total = insert.op("Add", [total, node.outputs[0]], old.shape, old.dtype, f"sum{number}")
        ledger.changed(insert.nodes[-1], SUM(formats=len(stacks)), [concat])
    last = total.producer()
    assert last is not None
    replace(concat, last)
    return nodes


def _inputs(graph: ir.Graph, members: _Stack) -> list[ir.Value]:
    """Return the inputs of ``MatMulExperts`` between x and experts; stacks are made when they are written."""
    inputs = []
    first = members.products[0]
    for index, port in enumerate(MATMUL_TABLE.schema.inputs[1:], 1):
        value = first.inputs[index]
        assert value is not None and value.dtype is not None
        if port.name not in _OF_EXPERTS or (port.is_absent(value) and port.name == "bias"):
            inputs.append(value)
            continue
        if port.is_absent(value):
            zeros = np.zeros((1, 1, 1, 1), value.dtype.numpy())
            inputs.append(shared_constant(graph, f"no_zero_points_of_experts.{value.dtype.name.lower()}", zeros))
            continue
        weights = [weight_of(product, index) for product in members.products]
        parts = [expression_of(weight.const_value) for weight in weights if weight is not None and weight.const_value]
        inputs.append(new_weight(graph, f"{value.name}.experts", WeightTensor(stack(parts))))
    return inputs
