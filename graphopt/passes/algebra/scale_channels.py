"""Channels that products read are scaled, and what writes them is divided, so that weights that count round better."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from pydantic import Field

from graphopt.analysis.structure.products import is_thin, linear_nodes, lm_head_nodes, router_nodes
from graphopt.graph.diagnostics import Effect, Rule
from graphopt.graph.weights import Inline, Scale, own_input, rewrite, weight_of
from graphopt.numerics.formats import format_of
from graphopt.passes.base import Pass
from graphopt.passes.common.formats import LinearFormat
from graphopt.quantization.rounding import round_to_nearest
from graphopt.quantization.rounding.single_thread import one_thread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphopt.passes.context import Context, Ledger

CHANNELS_SCALED = Rule(
    "scale_channels.scaled",
    "channels scaled by the power {power:.2f} of what they read, {least:.3g} to {largest:.3g}: the rounding error is "
    "{share:.1%} of what it was",
)
WEIGHT_DIVIDED = Rule("scale_channels.divided", "divided by what {by} scale their channels with")
NO_BETTER = Rule("scale_channels.no-better", "no power of its channels makes the error of rounding less")
NO_WRITER = Rule(
    "scale_channels.no-writer",
    "its input is made by {op_type}: only a norm's gain, or a product in front of a Mul, can take the scales",
)
OTHER_READER = Rule("scale_channels.other-reader", "something else reads its input too: {op_type}")
LEFT_IN_FLOATS = Rule("scale_channels.left", "later steps leave it in floats, or round it otherwise")

Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True)
class _Writer:
    """What can take the scales of an input: a vector, or a matrix with one column for each channel."""

    node: ir.Node
    axis: int


class ScaleChannels(Pass):
    """Make channels that carry much larger in the weights that read them, and as much smaller where they come from.

    before::

        x = RMSNormalization(h, g);          y = MatMul(x, W)
        x = Mul(a, MatMul(z, V));            y = MatMul(x, W)

    after, for a vector s of positive numbers::

        x = RMSNormalization(h, g / s);      y = MatMul(x, diag(s) W)
        x = Mul(a, MatMul(z, V / s));        y = MatMul(x, diag(s) W)

    (x / s) (diag(s) W) = x W. A row of W that is larger takes a larger part of its group's codes, so it is rounded with
    less error for its size, at the cost of its neighbours (AWQ, Lin et al. 2024, section 3.2). s is the root mean
    square of the channel to a power from 0 to 1; the one is taken that makes the error of the products, the squared
    norm of X (W - Q(diag(s) W) / s), least when they are rounded to nearest in the format ``linear``. All products that
    read x share s. Inputs of an attention's output projection stay: query heads share what would have to be divided.

    Attributes:
        linear: the format of matrices of ``quantize_weights``.
        steps: how many powers are tried, from 0 to 1.
    """

    name: ClassVar[str] = "scale_channels"
    effect: ClassVar[Effect] = "exact"
    after: ClassVar[tuple[str, ...]] = ("fold_norms", "rotate", "split_inputs")

    linear: LinearFormat = LinearFormat()
    steps: Annotated[int, Field(ge=2, le=100)] = 11

    def rewrite(self, model: ir.Model, context: Context) -> None:
        """Scale the channels of every input that something can be divided for; say why others stay."""
        ledger, graph = context.ledger, model.graph
        special_nodes = {*lm_head_nodes(graph), *router_nodes(graph)}
        products: dict[ir.Value, list[ir.Node]] = {}
        for node in linear_nodes(graph):
            x, weight = node.inputs[0], weight_of(node, 1)
            assert x is not None and weight is not None
            if node in special_nodes or is_thin(weight) or weight.dtype != ir.DataType.FLOAT:
                ledger.skipped(node, LEFT_IN_FLOATS())
            else:
                products.setdefault(x, []).append(node)
        writers: dict[ir.Value, _Writer] = {}
        for x, nodes in products.items():
            other_reader = next((use.node for use in x.uses() if use.node not in nodes), None)
            writer = _writer_of(x)
            if other_reader is not None or x.is_graph_output() or writer is None:
                producer = x.producer()
                stays = NO_WRITER(op_type=producer.op_type if producer else "the graph")
                reason = (
                    stays
                    if writer is None
                    else OTHER_READER(op_type=other_reader.op_type if other_reader else "an output")
                )
                for node in nodes:
                    ledger.skipped(node, reason)
            else:
                writers[x] = writer
        statistics = context.statistics.inputs(model, [products[x][0] for x in writers]) if writers else {}
        for x, writer in writers.items():
            self._scale(products[x], writer, statistics[products[x][0]].hessian().numpy(), ledger)

    def _scale(self, nodes: Sequence[ir.Node], writer: _Writer, hessian: npt.NDArray[Any], ledger: Ledger) -> None:
        matrices = [np.asarray(weight.const_value.numpy(), np.float64) for weight in _weights(nodes)]
        powers = np.linspace(0, 1, self.steps)
        errors = [self._error(matrices, scales_of(hessian, float(power)), hessian) for power in powers]
        best = int(np.argmin(errors))
        scales = scales_of(hessian, float(powers[best]))
        if best == 0 or (scales == 1).all():
            for node in nodes:
                ledger.skipped(node, NO_BETTER())
            return
        for node in nodes:
            weight = own_input(node, 1)
            rewrite(weight, partial(Scale, factors=Inline.from_array(scales), axis=0))
            share = errors[best] / errors[0]
            figures = {"least": float(scales.min()), "largest": float(scales.max()), "share": share}
            ledger.changed(weight, CHANNELS_SCALED(power=float(powers[best]), **figures))
        divided_weight = own_input(writer.node, 1)
        rewrite(divided_weight, partial(Scale, factors=Inline.from_array(1 / scales), axis=writer.axis))
        ledger.changed(divided_weight, WEIGHT_DIVIDED(by=[node.name or "?" for node in nodes]))

    def _error(self, matrices: Sequence[Doubles], scales: Doubles, hessian: npt.NDArray[Any]) -> float:
        """Return the trace of E^T H E, E what rounding the scaled matrices to nearest loses, of all together."""
        table, total = format_of(self.linear.format), 0.0
        for matrix in matrices:
            producer = round_to_nearest(scales[:, None] * matrix, table, self.linear.group, "least_squares")
            error = (matrix - producer.dequantize() / scales[:, None]).astype(np.float32)
            with one_thread():
                total += float(np.vdot(error, hessian @ error))
        return total


def scales_of(hessian: npt.NDArray[Any], power: float) -> Doubles:
    """Return the root mean squares of channels to a power, about 1 in the middle, float64 [rows].

    A channel that was always 0 has the smallest scale of the others.

    Args:
        hessian: X^T X, up to a factor, [rows, rows].
        power: 0 leaves 1 for all.
    """
    size = np.sqrt(np.maximum(np.diagonal(hessian).astype(np.float64), 0))
    alive = size > 0
    if not alive.any():
        return np.ones(len(size))
    size[~alive] = size[alive].min()
    exponents = power * np.log2(size)
    middle = (exponents.max() + exponents.min()) / 2
    return np.asarray(2.0 ** (exponents - middle))


def _weights(nodes: Sequence[ir.Node]) -> list[Any]:
    return [weight_of(node, 1) for node in nodes]


def _writer_of(x: ir.Value) -> _Writer | None:
    """Return what can be divided so that ``x`` is: the gain of a norm, or the matrix of a factor of a product."""
    node = x.producer()
    if node is None or node.domain:
        return None
    if node.op_type == "RMSNormalization":
        gain = weight_of(node, 1)
        vector = gain is not None and gain.const_value is not None and len(gain.const_value.shape) == 1
        return _Writer(node, 0) if vector and not any(extra.uses() for extra in node.outputs[1:]) else None
    if node.op_type != "Mul":
        return None
    for factor in node.inputs:
        producer = None if factor is None else factor.producer()
        if (
            factor is None
            or producer is None
            or producer.op_type != "MatMul"
            or producer.domain
            or factor.is_graph_output()
        ):
            continue
        weight = weight_of(producer, 1)
        if weight is not None and len(weight.shape or ()) == 2 and len(factor.uses()) == 1:
            return _Writer(producer, 1)
    return None
