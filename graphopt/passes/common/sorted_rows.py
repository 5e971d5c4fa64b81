"""Rows that a graph sorts by expert, and how to do without the order.

Exporters sort the choices of a router, gather rows in that order, and put results back::

    sorted, perm = TopK(choices; smallest first)      ends = CumSum(histogram(sorted))      inverse[perm] = 0, 1, ...

by dozens of nodes on integers. What such a node computes is sorts by running it on permutations, not by its operators.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from graphopt.graph.diagnostics import Fact, Rule
from graphopt.graph.editing import Inserter, bypass, drop, insert_behind, name_output, shared_constant
from graphopt.passes.common.nodes import ELEMENTWISE
from graphopt.runtime_ops import DOMAIN
from graphopt.runtime_ops.hadamard.spec.op import HADAMARD
from graphopt.runtime_ops.matmul_experts.spec.op import MATMUL_EXPERTS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from graphopt.analysis.structure.experts import Mixture
    from graphopt.ort.runner import Runner
    from graphopt.passes.context import Context

IN_ORDER = Rule(
    "group_experts.unordered", "tokens as the router gives them: nothing is sorted in front and put back behind"
)
STAYS_SORTED = Rule("group_experts.stays-sorted", "its rows are sorted by expert in the graph: {reason}")
NO_SORT = Rule("group_experts.no-sort", "no sort of a router's choices made the order")
OTHER_READER = Rule(
    "group_experts.other-reader", "{node} ({op_type}) reads sorted rows, and does not treat them one by one"
)

Integers = npt.NDArray[np.int64]

_SEED = 0


@dataclass(frozen=True)
class _Sort:
    """A sort of choices.

    Attributes:
        node: ``TopK`` of int64 [n], all of them, smallest first: sorted choices and where they stood.
        choices: what a router chose, int64 [tokens, top], which is [n] in front of the sort.
    """

    node: ir.Node
    choices: ir.Value

    @property
    def top(self) -> int:
        """Experts of a token."""
        size = (self.choices.shape or [1])[-1]
        assert isinstance(size, int)
        return size


def expert_of_rows(model: ir.Model, mixture: Mixture, runner: Runner) -> ir.Value:
    """Return the expert of each of the rows of a mixture, int64 [n].

    Those that were sorted, where the ends of ``mixture`` count them; else new nodes compare rows with the ends.
    """
    bounds = mixture.bounds
    assert bounds is not None
    for sort in _sorts(model.graph):
        if _counts(model, sort, bounds, len(mixture.products), runner):
            return sort.node.outputs[0]
    insert = Inserter(model.graph, mixture.concat, f"{mixture.concat.name}.rows")
    dims = None if mixture.rows.shape is None else [mixture.rows.shape[0]]
    count = insert.op("Shape", [mixture.rows], [1], ir.DataType.INT64, "count", start=0, end=1)
    scalar = insert.op("Squeeze", [count], [], ir.DataType.INT64, "number")
    rows = insert.op("Range", [insert.integers(0), scalar, insert.integers(1)], dims, ir.DataType.INT64, "range")
    column = insert.op("Unsqueeze", [rows, insert.integers([1])], dims and [*dims, 1], ir.DataType.INT64, "column")
    pairs = dims and [*dims, len(mixture.products)]
    comparison = insert.op("GreaterOrEqual", [column, bounds], pairs, ir.DataType.BOOL, "comparison")
    numbers = insert.op("Cast", [comparison], pairs, ir.DataType.INT64, "numbers", to=ir.DataType.INT64)
    return insert.op("ReduceSum", [numbers, insert.integers([1])], dims, ir.DataType.INT64, "experts", keepdims=0)


def restore_order(model: ir.Model, nodes: Sequence[ir.Node], context: Context) -> None:
    """Let ``MatMulExperts`` take tokens in the order that they have, with all that treats sorted rows one by one.

    Args:
        model: the model.
        nodes: those whose rows a graph may sort.
        context: where changes and refusals are written down, and what runs parts of the model.
    """
    graph, ledger, remaining = model.graph, context.ledger, list(nodes)
    for sort in _sorts(graph):
        of_sort = [node for node in remaining if _choices_of(node) is sort.node.outputs[0]]
        if not of_sort:
            continue
        remaining = [node for node in remaining if node not in of_sort]
        region = _region(model, sort, set(of_sort), context.runner)
        if isinstance(region, Fact):
            for node in of_sort:
                ledger.skipped(node, STAYS_SORTED(reason=region))
            continue
        _rewire(graph, sort, region)
        for node in of_sort:
            ledger.changed(node, IN_ORDER(), [node])
    for node in remaining:
        ledger.skipped(node, STAYS_SORTED(reason=NO_SORT()))


def _sorts(graph: ir.Graph) -> list[_Sort]:
    """Return every sort of choices [tokens, top] of a graph, in order."""
    sorts = []
    for node in graph:
        flat = node.inputs[0] if node.op_type == "TopK" and not node.domain else None
        reshape = None if flat is None else flat.producer()
        if flat is None or flat.dtype != ir.DataType.INT64 or reshape is None or reshape.op_type != "Reshape":
            continue
        choices = reshape.inputs[0]
        is_whole = choices is not None and choices.shape is not None and len(choices.shape) == 2
        if node.attributes.get_int("largest", 1) or len(flat.shape or ()) != 1 or not is_whole:
            continue
        assert choices is not None and choices.shape is not None
        if isinstance(choices.shape[1], int):
            sorts.append(_Sort(node, choices))
    return sorts


def _choices_of(node: ir.Node) -> ir.Value | None:
    """Return the sorted choices that a ``MatMulExperts`` reads, perhaps by a table of producer."""
    value = node.inputs[MATMUL_EXPERTS.schema.index("experts")]
    producer = None if value is None else value.producer()
    return producer.inputs[1] if producer is not None and producer.op_type == "Gather" else value


def _counts(model: ir.Model, sort: _Sort, bounds: ir.Value, experts: int, runner: Runner) -> bool:
    """Return whether ``bounds`` says how many of the sorted choices are an expert or one before it."""
    draws = _draws(sort.top, experts)
    counts = [np.searchsorted(choices, np.arange(experts), side="right") for choices, _ in draws]
    results = _run(model, sort, [bounds], draws, runner)
    return results is not None and all(np.array_equal(a[0], b) for a, b in zip(results, counts, strict=True))


class _Draw(NamedTuple):
    """Choices of some tokens, sorted, and where they stood."""

    choices: Integers
    order: Integers


def _draws(top: int, experts: int) -> list[_Draw]:
    """Return choices of all experts, of few, of one alone."""
    random = np.random.default_rng(_SEED)
    count = top * max(7, 2 * -(-experts // top))
    rows = [random.permutation(np.arange(count) % experts)]
    rows += [random.choice(random.integers(0, experts, 3), count) for _ in range(3)]
    rows += [np.full(count, expert) for expert in (0, experts - 1)]
    orders = [np.argsort(row, kind="stable") for row in rows]
    return [_Draw(row[order].astype(np.int64), order.astype(np.int64)) for row, order in zip(rows, orders, strict=True)]


def _run(
    model: ir.Model, sort: _Sort, values: Sequence[ir.Value], draws: Sequence[_Draw], runner: Runner
) -> list[list[Integers]] | None:
    """Return what values are for each draw of sorted choices; ``None`` where more than choices is needed to tell.

    Other sorts are given other draws: what depends on theirs is not taken for this one's. Layers read sizes from one
    another, which are fed.
    """
    tokens = len(draws[0].choices) // sort.top
    feeds: dict[ir.Value, list[Integers]] = dict(_sizes(model.graph, sort, tokens, len(draws)))
    for layer_sort in _sorts(model.graph):
        draws_of_sort = draws if layer_sort.node is sort.node else [*draws[1:], draws[0]]
        feeds[layer_sort.node.outputs[0]] = [draw.choices for draw in draws_of_sort]
        feeds[layer_sort.node.outputs[1]] = [draw.order for draw in draws_of_sort]
    try:
        part = ir.convenience.extract(model.graph, list(feeds), list(values))
    except ValueError:
        return None
    for port in [port for port in part.inputs if not port.uses()]:
        part.inputs.remove(port)
    calls = [{value.name or "": arrays[number] for value, arrays in feeds.items()} for number in range(len(draws))]
    try:
        return runner.run(ir.Model(part, ir_version=model.ir_version), calls)
    except Exception:  # whatever onnxruntime raises: what cannot be run is left alone
        return None


def _sizes(graph: ir.Graph, sort: _Sort, tokens: int, calls: int) -> Iterator[tuple[ir.Value, list[Integers]]]:
    """Yield the output of each ``Shape`` and what it is where the sort has the choices of so many tokens."""
    assert sort.choices.shape is not None
    count = sort.choices.shape[0]
    if isinstance(count, int):
        return
    symbols = sorted(count.free_symbols())
    bindings = dict.fromkeys(symbols, 1) | dict.fromkeys(symbols[-1:], tokens)
    if count.evaluate(bindings) != tokens:
        return
    for node in graph:
        x = node.inputs[0] if node.op_type == "Shape" and not node.domain else None
        if x is None or x.shape is None:
            continue
        sizes = [dim if isinstance(dim, int) else dim.evaluate(bindings) for dim in x.shape]
        part = sizes[node.attributes.get_int("start", 0) : node.attributes.get_int("end", len(sizes))]
        if all(isinstance(size, int) for size in part):
            yield node.outputs[0], [np.array(part, np.int64)] * calls


@dataclass
class _Region:
    """Nodes around rows that a sort put into order.

    Attributes:
        rows: gather what each choice has, such as its weight, or biases of all choices.
        tokens: gather the rows of tokens, one for each choice.
        biases: gather rows of a table by sorted choices.
        ends: gather results in the order of the choices.
        products: multiply sorted rows; the value is whether the rows are those of tokens.
    """

    rows: list[ir.Node]
    tokens: list[ir.Node]
    biases: list[ir.Node]
    ends: list[ir.Node]
    products: dict[ir.Node, bool]


def _region(model: ir.Model, sort: _Sort, nodes: set[ir.Node], runner: Runner) -> _Region | Fact:
    """Return the nodes around sorted rows, or what treats them otherwise than one by one."""
    gathers = _gathers(model, sort, runner)
    region = _Region([], [], [], [], {})
    in_order: set[ir.Value] = set()  # values whose rows are in sorted order
    of_tokens: set[ir.Value] = set()  # likewise, with rows that tokens share
    for node in model.graph:
        kind, x = gathers.get(node), node.inputs[0] if node.inputs else None
        if node in nodes:
            region.products[node] = x in of_tokens
            if x not in of_tokens | in_order:
                return OTHER_READER(node=node.name, op_type=node.op_type)
            in_order.update(node.outputs)
        elif kind == "back" and x in in_order and not node.outputs[0].is_graph_output():
            region.ends.append(node)
        elif kind in ("rows", "tokens", "biases") and x not in in_order | of_tokens:
            if node.outputs[0].is_graph_output():
                return OTHER_READER(node=node.name, op_type=node.op_type)
            getattr(region, kind).append(node)
            if kind == "biases" and x is not None and x.dtype == ir.DataType.INT64:
                continue  # places of experts among those of their format
            (of_tokens if kind == "tokens" else in_order).update(node.outputs)
        elif in_order.intersection(node.inputs) or of_tokens.intersection(node.inputs):
            is_rotation = (node.domain, node.op_type) == (DOMAIN, HADAMARD.name)
            if is_rotation and x in of_tokens:
                of_tokens.update(node.outputs)
            elif _treats_rows_alone(node, in_order) and not any(value.is_graph_output() for value in node.outputs):
                in_order.update(node.outputs)
            else:
                return OTHER_READER(node=node.name, op_type=node.op_type)
    return region


def _gathers(model: ir.Model, sort: _Sort, runner: Runner) -> dict[ir.Node, str]:
    """Return what each node gathers whose indices are made of sorted choices: see :class:`_Region`, or "back"."""
    integers = (ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL)
    indices: set[ir.Value] = set(sort.node.outputs)
    candidates: list[ir.Node] = []
    for node in model.graph:
        if node.op_type in ("Gather", "GatherND") and not node.domain and node.inputs[0] not in indices:
            is_first = not node.attributes.get_int("axis", 0) and not node.attributes.get_int("batch_dims", 0)
            if node.inputs[1] in indices and is_first:
                candidates.append(node)
        elif indices.intersection(node.inputs) and all(value.dtype in integers for value in node.outputs):
            indices.update(node.outputs)
    values = list(dict.fromkeys(value for node in candidates if (value := node.inputs[1]) is not None))
    draws = _draws(sort.top, 4 * sort.top)[:4]
    # What the sort itself gives says what it is; the others are run.
    kinds: dict[ir.Value | None, str | None] = dict(zip(sort.node.outputs, ("biases", "rows"), strict=True))
    for value in values:
        if value in kinds:
            continue
        results = _run(model, sort, [value], draws, runner)
        names = {_kind(row[0], draw, sort.top) for row, draw in zip(results or (), draws, strict=bool(results))}
        kinds[value] = names.pop() if len(names) == 1 else None
    is_column = {node: node.op_type == "GatherND" for node in candidates}
    return {
        node: kind
        for node in candidates
        if (kind := kinds[node.inputs[1]]) is not None and len(node.inputs[1].shape or ()) == 1 + is_column[node]  # type: ignore[union-attr]
    }


def _kind(indices: Integers, draw: _Draw, top: int) -> str | None:
    choices, order = draw
    flat = indices.reshape(-1)
    if flat.shape != order.shape:
        return None
    if np.array_equal(flat, order):
        return "rows"
    if np.array_equal(flat, order // top):
        return "tokens"
    if np.array_equal(flat, choices):
        return "biases"
    return "back" if np.array_equal(flat[order], np.arange(len(order))) else None


def _treats_rows_alone(node: ir.Node, in_order: Collection[ir.Value]) -> bool:
    """Return whether a node makes row r of its outputs of row r of those inputs alone; the others have no such axis."""
    x, shape = node.inputs[0], node.outputs[0].shape
    inputs = [value for value in node.inputs if value is not None]
    if x is None or x.shape is None or shape is None:
        return False
    rank = len(x.shape)
    if node.domain == DOMAIN and node.op_type == HADAMARD.name:
        return x in in_order
    if node.domain:
        return False
    if node.op_type in ELEMENTWISE:
        return all(_goes_along(value, len(shape), value in in_order) for value in inputs)
    if node.op_type in ("Split", "Softmax", "LogSoftmax", "RMSNormalization", "LayerNormalization"):
        default = 0 if node.op_type == "Split" else -1
        return x in in_order and node.attributes.get_int("axis", default) % rank != 0
    if node.op_type == "Concat":
        return all(value in in_order for value in inputs) and node.attributes.get_int("axis", 0) % rank != 0
    if node.op_type in ("Slice", "Unsqueeze", "Squeeze"):
        index = 3 if node.op_type == "Slice" else 1
        axes = node.inputs[index] if index < len(node.inputs) else None
        if axes is None or axes.const_value is None:
            return False
        numbers = axes.const_value.numpy().reshape(-1)
        full = rank + len(numbers) if node.op_type == "Unsqueeze" else rank
        return x in in_order and all(int(axis) % full != 0 for axis in numbers)
    return node.op_type == "MatMul" and x in in_order and rank == 2 and node.inputs[1] not in in_order


def _goes_along(value: ir.Value, rank: int, is_ordered: bool) -> bool:
    """Return whether rows of ``value`` are those of a result of that rank, or all of them read the same of it."""
    if value.shape is None:
        return False
    return len(value.shape) == rank if is_ordered else len(value.shape) < rank or value.shape[0] == 1


def _rewire(graph: ir.Graph, sort: _Sort, region: _Region) -> None:
    flat = sort.node.inputs[0]
    assert flat is not None
    for node in region.ends:
        assert node.inputs[0] is not None
        bypass(node, node.inputs[0])
    for node, is_of_tokens in region.products.items():
        _choose(graph, node, sort.choices if is_of_tokens else flat)
        if is_of_tokens:
            _let_tokens_share(graph, node)
    for node in region.rows:
        assert node.inputs[0] is not None
        bypass(node, node.inputs[0])
    for node in region.tokens:
        assert node.inputs[0] is not None
        for use in list(node.outputs[0].uses()):
            for value in use.node.outputs:
                if use.node.op_type == HADAMARD.name:
                    value.shape = node.inputs[0].shape
        bypass(node, node.inputs[0])
    for node in region.biases:
        if node.outputs[0].uses():
            gather = ir.node("Gather", [node.inputs[0], flat], {"axis": 0}, name=f"{node.name}.choices")
            graph.insert_before(node, gather)
            name_output(gather, node.outputs[0])
            gather.metadata_props.update(node.metadata_props)
            bypass(node, gather.outputs[0])


def _choose(graph: ir.Graph, node: ir.Node, choices: ir.Value) -> None:
    """Let a ``MatMulExperts`` read these choices in place of sorted ones."""
    index = MATMUL_EXPERTS.schema.index("experts")
    old = node.inputs[index]
    assert old is not None
    producer = old.producer()
    if producer is not None and producer.op_type == "Gather":
        gather = ir.node("Gather", [producer.inputs[0], choices], {"axis": 0}, name=f"{producer.name}.{node.name}")
        graph.insert_before(node, gather)
        gather.metadata_props.update(producer.metadata_props)
        choices = name_output(gather, old, list(choices.shape or ()))
    node.replace_input_with(index, choices)
    drop(graph, old)


def _let_tokens_share(graph: ir.Graph, node: ir.Node) -> None:
    """Put a node that makes [n, N] of [tokens, top, N] behind a ``MatMulExperts``."""
    y, old = node.outputs[0], node.outputs[0].shape
    assert old is not None
    width = old[-1]
    shape = shared_constant(graph, f"rows_of.{width}", np.array([-1, width], np.int64))
    flat = ir.node("Reshape", [y, shape], name=f"{node.name}.rows")
    insert_behind(y, flat)
    choices = node.inputs[MATMUL_EXPERTS.schema.index("experts")]
    assert choices is not None and choices.shape is not None
    y.shape = ir.Shape([*choices.shape, width])
