"""Lower what torch traced to the operations that ONNX has: node by node, where torch would trace it a second time.

``torch.onnx.export`` runs a traced program twice more, operation by operation on tensors without data: once to lower it
to the operations that have a translation (``ExportedProgram.run_decompositions``), once to find operands of other types
(``InsertTypePromotion``). That is half of an export, and of most models little is left to lower: a cast, a reshape, an
``&``. Here each such node is replaced where it stands. A program with anything else goes torch's way.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import math
import operator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    # Of torch and a node: the node that replaces it, or the call that does; ``None`` where torch must do it.
    _Rule = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class _Call:
    """An operation on nodes, or on other calls.

    Attributes:
        target: the operation.
        args: its operands.
        kwargs: its attributes.
        example: a tensor of its type, shape and strides; by default that of the node that it replaces.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    example: Any = None


@contextlib.contextmanager
def lowered_by_node() -> Iterator[None]:
    """Let ``torch.onnx.export`` lower a program node by node where all that is to be lowered is known here."""
    passes: Any = importlib.import_module("torch.onnx._internal.exporter._fx_passes")
    promotion: Any = importlib.import_module("torch.onnx._internal.fx.passes.type_promotion")
    decompose = passes.decompose_with_registry
    interpreter = promotion._TypePromotionInterpreter
    run_node = interpreter.run_node

    def lower_or_decompose(program: Any, registry: Any) -> Any:
        return program if lower(program, registry) else decompose(program, registry)

    def run_if_promoted(self: Any, node: Any) -> Any:
        return _run_if_promoted(promotion, run_node, self, node)

    passes.decompose_with_registry, interpreter.run_node = lower_or_decompose, run_if_promoted
    try:
        yield
    finally:
        passes.decompose_with_registry, interpreter.run_node = decompose, run_node


def lower(program: Any, registry: Any) -> bool:
    """Lower a program in place, as ``program.run_decompositions`` does, if each of its nodes is known; else leave it.

    Args:
        program: a ``torch.export.ExportedProgram``.
        registry: which operations have a translation, a ``torch.onnx._internal.exporter._registration.ONNXRegistry``.

    Returns:
        Whether it is lowered now. The graph is that of torch but for a reshape to the shape that a tensor has already,
        of which torch leaves some.
    """
    torch: Any = importlib.import_module("torch")
    operations = _Operations(torch, registry)
    nodes = [node for node in program.graph.nodes if node.op not in ("placeholder", "output")]
    if any(node.op != "call_function" for node in nodes):
        return False
    _state_types(torch, nodes)
    if not all(map(operations.lowers, nodes)):
        return False
    module = program.graph_module
    with module._set_replace_hook(program.graph_signature.get_replace_hook()):
        for node in nodes:
            if (rule := operations.rule_of(node.target)) is not None:
                _replace(module.graph, node, rule(torch, node))
    module.graph.eliminate_dead_code()
    module.recompile()
    return True


def _state_types(torch: Any, nodes: list[Any]) -> None:
    """Let nodes that transformers inserted into a program say what they give, as those of torch do."""
    mode = torch._guards.detect_fake_mode([node.meta.get("val") for node in nodes])
    for node in nodes:
        if "val" not in node.meta and getattr(getattr(node.target, "_schema", None), "returns", None):
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda operand: operand.meta["val"])
            with mode:
                node.meta["val"] = node.target(*args, **kwargs)


def _replace(graph: Any, node: Any, replacement: Any) -> None:
    memory = node.args[0] if _writes(node.target) else None
    if isinstance(replacement, _Call):
        replacement = _insert(graph, node, replacement)
    if memory is not None:
        # Whoever reads the tensor from here on reads what was written into it.
        memory.replace_all_uses_with(replacement, delete_user_cb=lambda user: user is not replacement and node < user)
    node.replace_all_uses_with(replacement)
    graph.erase_node(node)


def _insert(graph: Any, node: Any, call: _Call) -> Any:
    args = tuple(_insert_operand(graph, node, x) for x in call.args)
    with graph.inserting_before(node):
        new = graph.call_function(call.target, args, call.kwargs)
    new.meta = dict(node.meta)
    if call.example is not None:
        new.meta["val"] = call.example
    return new


def _insert_operand(graph: Any, node: Any, operand: Any) -> Any:
    if isinstance(operand, list):
        return [_insert_operand(graph, node, part) for part in operand]
    return _insert(graph, node, operand) if isinstance(operand, _Call) else operand


class _Operations:
    """What may stay as it is, and what replaces an operation."""

    def __init__(self, torch: Any, registry: Any) -> None:
        decompositions: Any = importlib.import_module("torch.onnx._internal.exporter._decomp")
        self.onnx_operations = set(decompositions.get_onnx_implemented_overloads(registry))
        self.table = decompositions.create_onnx_friendly_decomposition_table(self.onnx_operations)
        self.torch = torch
        self.utils: Any = importlib.import_module("torch._export.utils")
        aten = torch.ops.aten
        # They compute with sizes; or state what holds of them, which the exporter removes.
        self.stay = {
            aten.sym_size.int,
            aten.sym_constrain_range_for_size.default,
            aten._assert_async.default,
            aten._assert_async.msg,
            aten._assert_scalar.default,
            aten._assert_tensor_metadata.default,
        }
        self.rules: dict[Any, _Rule] = {
            aten.to.dtype: _cast,
            aten.to.dtype_layout: _cast,
            aten.to.device: _cast,
            aten.type_as.default: _cast,
            aten.detach.default: _operand,
            aten.dropout.default: _inference_dropout,
            aten.reshape.default: _view,
            aten.flatten.using_ints: _flatten,
            aten.unflatten.int: _view_by_sizes,
            aten.rsub.Scalar: _subtract_from,
            aten.square.default: _square,
            aten.numpy_T.default: _reverse_axes,
            aten.broadcast_to.default: _rename(aten.expand.default),
            aten.chunk.default: _split,
            aten.argsort.default: _order,
            aten.conv2d.padding: _convolve,
            aten.__and__.Tensor: _rename(aten.bitwise_and.Tensor),
            aten.__or__.Tensor: _rename(aten.bitwise_or.Tensor),
            aten.min.other: _rename(aten.minimum.default),
            aten.max.other: _rename(aten.maximum.default),
        }
        # ONNX has no strides: there it gives on what it is given.
        self.stay.add(aten.contiguous.default)

    def rule_of(self, target: Any) -> _Rule | None:
        """Return what replaces nodes of ``target``, if anything does."""
        if _writes(target):
            name = target._schema.name.partition("::")[2].removesuffix("_")
            packet = getattr(self.torch.ops.aten, name, None)
            pure = getattr(packet, target._overloadname, None)
            return _give_anew(pure) if pure in self.onnx_operations else None
        return self.rules.get(target)

    def lowers(self, node: Any) -> bool:
        """Return whether a node may stay, or is replaced."""
        rule = self.rule_of(node.target)
        return self.stays(node.target) if rule is None else rule(self.torch, node) is not None

    def stays(self, target: Any) -> bool:
        """Return whether torch's lowering leaves nodes of ``target`` as they are."""
        if target in self.stay or target is operator.getitem:
            return True
        if not isinstance(target, self.torch._ops.OpOverload):
            # Of sizes: `operator.mul`, `torch.sym_max`.
            return getattr(target, "__module__", None) in ("_operator", "math", "torch")
        is_onnx = target in self.onnx_operations or target.namespace == "onnx"  # as `torch.onnx.ops` has them
        if not is_onnx or target in self.table or target._schema.is_mutable:
            return False
        # Of operations that are made of others, torch keeps those that give no view of an operand.
        return not self.utils._is_cia_op(target) or bool(self.utils._is_preservable_cia_op(target))


def _writes(target: Any) -> bool:
    """Return whether an operation writes into its first operand, and into no other, and gives it on."""
    schema = getattr(target, "_schema", None)
    if schema is None or not schema.name.startswith("aten::") or not schema.name.endswith("_"):
        return False
    writes = [argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments]
    return bool(writes and writes[0] and not any(writes[1:]) and len(schema.returns) == 1)


def _rename(target: Any) -> _Rule:
    return lambda _, node: _Call(target, node.args, node.kwargs)


def _operand(_: Any, node: Any) -> Any:
    return node.args[0]


def _cast(torch: Any, node: Any) -> Any:
    before, after = node.args[0].meta["val"], node.meta["val"]
    if before.dtype == after.dtype:
        return node.args[0]
    return _Call(torch.ops.aten._to_copy.default, (node.args[0],), {"dtype": after.dtype})


def _inference_dropout(_: Any, node: Any) -> Any:
    trains = node.args[2] if len(node.args) > 2 else node.kwargs.get("train", True)
    return None if trains else node.args[0]


def _view(torch: Any, node: Any) -> Any:
    return _view_of(torch, node, node.args[1])


def _view_by_sizes(torch: Any, node: Any) -> Any:
    """Return a view whose sizes that vary are those that the program has a node for."""
    sizes: dict[Any, Any] = {}
    for candidate in itertools.takewhile(lambda candidate: candidate is not node, node.graph.nodes):
        value = candidate.meta.get("val")
        if isinstance(value, torch.SymInt):
            sizes.setdefault(value.node.expr, candidate)
    shape = [size if isinstance(size, int) else sizes.get(size.node.expr) for size in node.meta["val"].shape]
    return None if any(size is None for size in shape) else _view_of(torch, node, shape)


def _flatten(torch: Any, node: Any) -> Any:
    """Return a view by the sizes of the operand, which are read and multiplied where they vary."""
    if (view := _view_by_sizes(torch, node)) is not None:
        return view
    operands = tuple(node.args)
    x, first, last = operands + (0, -1)[len(operands) - 1 :]
    dims = x.meta["val"].shape
    first, last = first % len(dims), last % len(dims)

    def size_of(axis: int) -> Any:
        size = dims[axis]
        return size if isinstance(size, int) else _Call(torch.ops.aten.sym_size.int, (x, axis), example=size)

    def product_of(axes: range) -> Any:
        if len(axes) == 1:
            return size_of(axes[0])
        product = math.prod(dims[axis] for axis in axes)
        return _Call(operator.mul, (product_of(axes[:-1]), size_of(axes[-1])), example=product)

    shape = [*map(size_of, range(first)), product_of(range(first, last + 1)), *map(size_of, range(last + 1, len(dims)))]
    return _view_of(torch, node, shape)


def _view_of(torch: Any, node: Any, shape: Any) -> Any:
    x = node.args[0]
    before, after = x.meta["val"].shape, node.meta["val"].shape
    is_true = importlib.import_module("torch.fx.experimental.symbolic_shapes").statically_known_true
    if len(before) == len(after) and all(map(is_true, map(operator.eq, before, after))):
        return x
    if not torch._C._is_alias_of(x.meta["val"], node.meta["val"]):
        # Its strides allow no view.
        contiguous = {"memory_format": torch.contiguous_format}
        x = _Call(torch.ops.aten.clone.default, (x,), contiguous, x.meta["val"].contiguous())
    return _Call(torch.ops.aten.view.default, (x, shape))


def _subtract_from(torch: Any, node: Any) -> Any:
    x, minuend = node.args[:2]
    is_plain = len(node.args) == 2 and not node.kwargs  # with no factor
    return _Call(torch.ops.aten.sub.Tensor, (minuend, x)) if is_plain else None


def _square(torch: Any, node: Any) -> Any:
    return _Call(torch.ops.aten.pow.Tensor_Scalar, (node.args[0], 2))


def _reverse_axes(torch: Any, node: Any) -> Any:
    axes = range(node.meta["val"].dim())
    return _Call(torch.ops.aten.permute.default, (node.args[0], [*reversed(axes)]))


def _split(torch: Any, node: Any) -> Any:
    x, chunks = node.args[:2]
    axis = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)
    size = x.meta["val"].shape[axis]
    # Of a size that varies, the pieces are for torch to decide.
    return _Call(torch.ops.aten.split.Tensor, (x, math.ceil(size / chunks), axis)) if isinstance(size, int) else None


def _order(torch: Any, node: Any) -> Any:
    """Return the indices of a sort."""
    indices = node.meta["val"]
    values = node.args[0].meta["val"].new_empty(indices.shape)
    call = _Call(torch.ops.aten.sort.default, node.args, node.kwargs, (values, indices))
    return _Call(operator.getitem, (call, 1))


def _convolve(torch: Any, node: Any) -> Any:
    """Return a convolution by the numbers of a padding that is called by its name, where both sides have as many."""
    operands, defaults = tuple(node.args), (None, [1, 1], "valid", [1, 1], 1)
    x, weight, bias, stride, padding, dilation, groups = operands + defaults[len(operands) - 2 :]
    sizes = weight.meta["val"].shape[2:]
    if node.kwargs or padding not in ("valid", "same") or len(dilation) != len(sizes):
        return None
    spans = [step * (size - 1) for size, step in zip(sizes, dilation, strict=True)]
    if padding == "same" and any(span % 2 for span in spans):
        return None
    numbers = [span // 2 if padding == "same" else 0 for span in spans]
    return _Call(torch.ops.aten.conv2d.default, (x, weight, bias, stride, numbers, dilation, groups))


def _give_anew(pure: Any) -> _Rule:
    """Return the rule that replaces an operation that writes into its operand by ``pure``, which gives a new tensor."""

    def rule(torch: Any, node: Any) -> Any:
        operands = [operand.meta.get("val") for operand in node.all_input_nodes]
        floats = {x.dtype for x in operands if isinstance(x, torch.Tensor) and x.is_floating_point()}
        # Of several types, what is written takes that of the operand, and a new tensor another.
        return _Call(pure, node.args, node.kwargs) if floats <= {node.meta["val"].dtype} and _is_alone(node) else None

    return rule


def _is_alone(node: Any) -> bool:
    """Return whether no other tensor shares the memory that ``node`` writes into."""
    owner, family = node.args[0], []
    while owner.op == "call_function" and _writes(owner.target):
        family.append(owner)
        owner = owner.args[0]
    maker = owner.args[0] if owner.target is operator.getitem else owner
    if maker.op != "call_function" or _shares(maker):
        return False
    users = {user for member in (owner, *family) for user in member.users if user < node}
    return not any(_shares(user) and not _writes(user.target) for user in users)


def _shares(node: Any) -> bool:
    """Return whether a node may give a view of an operand."""
    schema = getattr(node.target, "_schema", None)
    if schema is not None and schema.name == "aten::to":
        return bool(node.args[0].meta["val"].dtype == node.meta["val"].dtype)
    return schema is None or any(result.alias_info is not None for result in schema.returns)


def _run_if_promoted(promotion: Any, run_node: Any, interpreter: Any, node: Any) -> Any:
    """Cast the operands of a node where types are promoted; run it only if something of it has changed."""
    value = node.meta.get("val")
    if node.op != "call_function" or value is None:
        return run_node(interpreter, node)
    rerun = any(interpreter.env[x] is not x.meta.get("val") for x in node.all_input_nodes)
    before = node.target, node.args, node.kwargs
    with interpreter._set_current_node(node):
        if rule := promotion.get_type_promotion_rule(node, interpreter.type_promotion_table):
            interpreter._maybe_promote_node(node, rule)
    if rerun or before != (node.target, node.args, node.kwargs):
        return super(promotion._TypePromotionInterpreter, interpreter).run_node(node)
    return value
