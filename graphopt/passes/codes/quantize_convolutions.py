"""Convolutions get codes of few bits for their weights, and, where inputs were given, for what they read and make."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from pydantic import Field, model_validator

from graphopt.errors import InputError
from graphopt.graph.diagnostics import Effect, Rule
from graphopt.graph.editing import drop
from graphopt.graph.weights import Reshape, SameShape, Transpose, WeightTensor, expression_of, new_weight, weight_of
from graphopt.numerics.formats import format_of
from graphopt.passes.base import Pass
from graphopt.passes.common.integer_tensors import integer_tensors, put_codes_between
from graphopt.passes.common.weight_decoders import StoredWeight, decode, lift_weight
from graphopt.quantization.rounding.lazy_codes import quantize_lazily
from graphopt.quantization.rounding.scales import Scale
from graphopt.quantization.statistics.ranges import RangeMethod, TensorRanges, step_and_zero
from graphopt.runtime_ops.instructions import instructions_here

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from graphopt.graph.diagnostics import Fact
    from graphopt.graph.weights import Array, Expression, Region
    from graphopt.numerics.formats import Format
    from graphopt.passes.context import Context, Ledger, Statistics

STORAGE = Rule("quantize_convolutions.stored", "{weight} as {format}, {scales}")
INTEGERS = Rule("quantize_convolutions.integers", "codes 0 to 255 of {low:.4g} to {high:.4g}")
BIAS = Rule("quantize_convolutions.bias", "{bias} in steps of its input's times its weight's")
RANGES = Rule(
    "quantize_convolutions.ranges", "ranges of {tensors} tensors over {samples} {kind}, with the digest {digest}"
)
WEIGHTS_ALONE = Rule(
    "quantize_convolutions.weights-alone",
    "convolutions read floats, since ranges of random inputs would cut off what real ones reach; give some: --inputs "
    "FILE.npz",
)
NOT_CONSTANT = Rule("quantize_convolutions.not-constant", "its weight is computed")
NOT_FLOAT = Rule("quantize_convolutions.not-float", "its weight is {type}, not float32")
NO_BLOCKS = Rule("quantize_convolutions.no-blocks", "its {channels} input channels are no multiple of {group}")
LEFT_IN_FLOATS = Rule("quantize_convolutions.left", "the recipe leaves it in floating point")
TAPS = Rule(
    "quantize_convolutions.taps", "one channel each: its few weights stay in floats unless its inputs become codes"
)
OF_TEXT = Rule("quantize_convolutions.of-text", "taps over tokens of a model that reads text: errors would add up")
FLOATS_IN_BRANCHES = Rule(
    "quantize_convolutions.branches",
    "{nodes} convolutions in branches read floats, since tensors inside have no ranges; their weights are codes",
)
BIAS_COMPUTED = Rule("quantize_convolutions.bias-computed", "its bias is computed, so it reads floats")
VARYING_RANGE = Rule(
    "quantize_convolutions.varying-range", "{input}, which it reads, has another range in each step, so it reads floats"
)
BIAS_TOO_LARGE = Rule(
    "quantize_convolutions.bias-too-large", "{bias} exceeds 32 bits in such steps, so it stays in floats"
)

_CODES = format_of("int8")
_LARGEST = np.iinfo(np.int32).max


@dataclasses.dataclass(frozen=True, eq=False)
class SignedCodes(SameShape):
    """Codes of a signed format of fewer than 8 bits, in two's complement of so many bits, as int8."""

    bits: int

    @property
    def dtype(self) -> ir.DataType:
        """int8."""
        return ir.DataType.INT8

    def evaluate(self, region: Region) -> Array:
        """Extend the signs in the region."""
        sign = 1 << (self.bits - 1)
        return ((self.source.evaluate(region).astype(np.int16) ^ sign) - sign).astype(np.int8)


class QuantizeConvolutions(Pass):
    """Store the weights of convolutions in few bits, one scale for each output channel or block of input channels.

    before::

        y = Conv(x, W, b)                                                    W [out, in, ...], float32

    after::

        y = Conv(x, DequantizeLinear(codes, scales; axis=0), b)              scales [out]
        y = Conv(x, DequantizeLinear(codes, scales; axis=1, block_size=g), b)    scales [out, in / g, ...]

    and where tensors between convolutions are codes, too::

        x' = DequantizeLinear(QuantizeLinear(x, s_x, z_x), s_x, z_x)
        y = Conv(x', DequantizeLinear(codes, s_w; axis=0), DequantizeLinear(round(b / (s_x s_w)), s_x s_w; axis=0))

    with s = (high - low) / 255 and z = round(-low / s) for a tensor that reaches from low to high. onnxruntime makes
    a product of integers of each such ``Conv``, ``QLinearConv``, since sum (q_x - z_x) s_x q_w s_w + b = s_x s_w (sum
    (q_x - z_x) q_w + round(b / (s_x s_w))) up to rounding, and of ``Add``, ``Mul``, ``Concat``, ``MaxPool``, averages
    and what moves numbers between convolutions operators of codes (Jacob et al., CVPR 2018, section 2). A ``Relu`` or
    ``Clip`` behind becomes the low end of the range. Tensors that lead to no convolution stay in floats, and so does
    the noisy sample of a diffusion model, whose range differs from step to step, with the convolution that reads it.

    Convolutions in branches and loops (the bodies of ``If``, ``Loop`` and ``Scan``) read floats: their weights alone
    become codes, which lie in the graph itself and are decoded where they are read. ``compress_weights`` stores those
    of ``ConvTranspose`` and of recurrences.

    Ranges are found by running the model on the inputs of the recipe (``--inputs``). The manifest holds them, so the
    same model is made again from it. Without inputs only weights become codes: onnxruntime decodes them in each run,
    which makes the file smaller and nothing faster.

    CPUs without VNNI add two products of 8 bits in 16 bits, which large ones overflow: 2 x 255 x 127 > 32767. Weights
    of 7 bits cannot, and are the default where such a CPU optimizes.

    Attributes:
        format: of weights: int8; int7, stored as int8, where convolutions multiply codes, and int8 elsewhere; or int4,
            with which convolutions read floats. ``None``: int7 if the machine that optimizes has AVX2 and no VNNI, else
            int8.
        group: input channels that share a scale; 0: all weights of an output channel do.
        scale: how scales of weights are chosen, see :func:`graphopt.quantization.rounding.round_to_nearest`.
        activations: "none": convolutions read floats; "static": codes of fixed ranges, also of random inputs; "auto":
            codes where inputs were given and weights allow it, floats otherwise.
        ranges: how the range of a tensor is chosen: minmax, percentile or mse.
        percentile: of the method of that name.
        floats: names of weights whose convolutions stay as they are.
        known_ranges: in place of running the model; manifests have them.
    """

    name: ClassVar[str] = "quantize_convolutions"
    effect: ClassVar[Effect] = "lossy"
    after: ClassVar[tuple[str, ...]] = ("unpack", "keep_codes", "spare_inputs")

    format: Literal["int8", "int7", "int4"] | None = None
    group: Annotated[int, Field(ge=0)] = 0
    scale: Scale = "least_squares"
    activations: Literal["auto", "static", "none"] = "auto"
    ranges: RangeMethod = "percentile"
    percentile: Annotated[float, Field(gt=50, le=100)] = 99.999
    floats: tuple[str, ...] = ()
    known_ranges: TensorRanges | None = None

    @model_validator(mode="after")
    def _codes_have_kernels(self) -> Self:
        if self.activations == "static" and not self._multiplies_integers:
            raise ValueError("integers are multiplied with int8 weights, one scale for each output channel")
        if self.group % 16:
            raise ValueError(f"a group has a multiple of 16 input channels, or 0 for all weights; it is {self.group}")
        return self

    @property
    def _multiplies_integers(self) -> bool:
        """Whether onnxruntime has a kernel that multiplies codes of inputs with such weights."""
        return self.format != "int4" and not self.group

    def on_this_machine(self) -> Self:
        """Return the pass with a format of weights whose products do not overflow on this machine."""
        if self.format is not None:
            return self
        return self.model_copy(update={"format": "int7" if instructions_here() == "avx2" else "int8"})

    @property
    def _bits(self) -> Format:
        return format_of(self.format or "int8")

    def self_contained(self, statistics: Statistics) -> Self:
        """See :class:`Pass`: with the ranges that were measured."""
        return self if statistics.ranges is None else self.model_copy(update={"known_ranges": statistics.ranges})

    def rewrite(self, model: ir.Model, context: Context) -> None:
        """Give each convolution codes; say why another one stays.

        Raises:
            InputError: the recipe names a weight that no convolution has, or states no range of a tensor.
        """
        graph, ledger = model.graph, context.ledger
        nodes = [node for node in graph.all_nodes() if (node.domain, node.op_type) == ("", "Conv")]
        in_branches = [node for node in nodes if node.graph is not graph]
        for node in in_branches:
            lift_weight(graph, node.inputs[1])
        self._check_names(nodes)
        steady = [node for node in nodes if node.graph is graph and not _has_varying_range(node, context)]
        is_static = self._is_static(context) and bool(steady)
        if self.format is None or (self.format == "int7" and not is_static):
            self.model_copy(update={"format": "int8"}).rewrite(model, context)
            return
        targets, branch_targets = [], []
        for node in nodes:
            is_inside = node.graph is not graph
            reason = self._why_not(node, context, is_static and not is_inside)
            if reason is not None:
                ledger.skipped(node, reason)
            elif is_inside:
                branch_targets.append(node)
            else:
                targets.append(node)
        if targets and is_static:
            targets = self._make_integers(model, targets, context)
        elif targets and not steady:
            for node in targets:
                ledger.skipped(node, VARYING_RANGE(input=node.inputs[0].name if node.inputs[0] is not None else None))
        elif targets and self.activations == "auto" and self._multiplies_integers:
            ledger.skipped("activations", WEIGHTS_ALONE())
        if branch_targets and is_static:
            ledger.skipped("branches", FLOATS_IN_BRANCHES(nodes=len(branch_targets)))
        stores: dict[ir.Value, StoredWeight] = {}
        for node in (*targets, *branch_targets):
            self._store(graph, node, stores, ledger)

    def _is_static(self, context: Context) -> bool:
        if self.activations != "auto":
            return self.activations == "static"
        task = context.task
        is_given = self.known_ranges is not None or (not task.reads_text and task.inputs_note() is None)
        return self._multiplies_integers and is_given

    def _check_names(self, nodes: Sequence[ir.Node]) -> None:
        names = {weight.name for node in nodes if (weight := weight_of(node, 1)) is not None}
        unknown = [name for name in self.floats if name not in names]
        if unknown:
            raise InputError(
                "the step quantize_convolutions names a weight that no convolution has",
                tensor=unknown[0],
                remedy=f"convolutions have {', '.join(sorted(str(name) for name in names)) or 'no constant weights'}",
            )

    def _why_not(self, node: ir.Node, context: Context, is_static: bool) -> Fact | None:
        weight = weight_of(node, 1)
        if weight is None or weight.const_value is None:
            return NOT_CONSTANT()
        if weight.name in self.floats:
            return LEFT_IN_FLOATS()
        if weight.dtype != ir.DataType.FLOAT:
            return NOT_FLOAT(type=str(weight.dtype))
        channels = int(weight.const_value.shape.numpy()[1])
        if channels == 1 and context.task.reads_text:
            return OF_TEXT()
        if channels == 1 and not is_static and node.attributes.get_int("group", 1) > 1:
            return TAPS()
        return NO_BLOCKS(channels=channels, group=self.group) if self.group and channels % self.group else None

    def _store(self, graph: ir.Graph, node: ir.Node, stores: dict[ir.Value, StoredWeight], ledger: Ledger) -> None:
        """Put codes in the place of the weight of ``node``; those that another reads already serve this one too."""
        weight = weight_of(node, 1)
        assert weight is not None and weight.const_value is not None
        if weight in stores:
            stores[weight].serve(node, 1)
            drop(graph, weight)
            return
        shape = tuple(map(int, weight.const_value.shape.numpy()))
        out, channels, *kernel = shape
        expression = expression_of(weight.const_value)
        if not self.group:
            parts = self._codes_and_scales(expression, out, -1)
            codes: Expression = Reshape.to_dims(parts["codes"], shape)
            scales: Expression = Reshape.to_dims(parts["scales"], (out,))
            attributes: dict[str, Any] = {"axis": 0}
        else:
            # Groups run along the input channels, for each place of the kernel by itself.
            last, back = (0, *range(2, len(shape)), 1), (0, len(shape) - 1, *range(1, len(shape) - 1))
            parts = self._codes_and_scales(Transpose(expression, last), -1, channels)
            codes = Transpose(Reshape.to_dims(parts["codes"], (out, *kernel, channels)), back)
            blocks = Reshape.to_dims(parts["scales"], (out, *kernel, channels // self.group))
            scales, attributes = Transpose(blocks, back), {"axis": 1, "block_size": self.group}
        values = [
            new_weight(graph, f"{weight.name}.{part}", WeightTensor(tensor))
            for part, tensor in (("codes", codes), ("scales", scales))
        ]
        fact = STORAGE(
            weight=weight.name,
            format=self._bits.name,
            scales=f"one scale for {self.group} input channels" if self.group else "one scale for an output channel",
        )
        stores[weight] = StoredWeight(values, attributes, {})
        ledger.changed(stores[weight].serve(node, 1), fact, [weight])
        drop(graph, weight)

    def _codes_and_scales(self, expression: Expression, rows: int, columns: int) -> dict[str, Expression]:
        """Return the codes and scales of a weight as rows whose numbers share scales."""
        matrix = WeightTensor(Reshape.to_dims(expression, (rows, columns)))
        group = self.group or matrix.shape.numpy()[1]
        parts = quantize_lazily(
            matrix, self._bits, group, self.scale, is_transposed=True, standard=self._bits.onnx_type is not None
        )
        expressions = {name: expression_of(tensor) for name, tensor in parts.items()}
        if self._bits.onnx_type is None:
            expressions["codes"] = SignedCodes(expressions["codes"], self._bits.bits)
        return expressions

    def _make_integers(self, model: ir.Model, nodes: Sequence[ir.Node], context: Context) -> list[ir.Node]:
        """Let the tensors between convolutions be codes, and biases integers; return whose weights become codes."""
        graph, ledger = model.graph, context.ledger
        of_computed_bias = {
            node for node in nodes if len(node.inputs) > 2 and node.inputs[2] and weight_of(node, 2) is None
        }
        for node in of_computed_bias:
            ledger.skipped(node, BIAS_COMPUTED())
        of_noise = {node for node in nodes if _has_varying_range(node, context)}
        for node in of_noise:
            ledger.skipped(node, VARYING_RANGE(input=node.inputs[0].name if node.inputs[0] is not None else None))
        integers = [node for node in nodes if node not in of_computed_bias | of_noise]
        tensors = integer_tensors(graph, set(integers))
        ranges = self._ranges_of(model, list(dict.fromkeys(tensors.values())), context)
        steps = {value: step_and_zero(*ranges[value.name or ""]) for value in tensors.values()}
        step_of = {node: float(steps[tensors[node.inputs[0]]][0]) for node in integers if node.inputs[0] is not None}
        biases = {node: self._bias_codes(node, step) for node, step in step_of.items()}
        # Between codes onnxruntime rounds a bias of floats to 32 bits by itself, whatever becomes of it.
        too_large = {node for node, codes in biases.items() if codes is not None and not codes.fits}
        for node in too_large:
            bias = node.inputs[2]
            assert bias is not None
            ledger.skipped(node, BIAS_TOO_LARGE(bias=bias.name))
        if too_large:
            integers = [node for node in integers if node not in too_large]
            tensors = integer_tensors(graph, set(integers))
        for node in integers:
            codes = biases[node]
            if codes is not None:
                _store_bias(graph, node, codes, ledger)
        for value, origin in tensors.items():
            low, high = ranges[origin.name or ""]
            encode = put_codes_between(graph, value, *steps[origin])
            ledger.changed(encode, INTEGERS(low=low, high=high), [value])
        return [node for node in nodes if node not in too_large]

    def _ranges_of(
        self, model: ir.Model, values: Sequence[ir.Value], context: Context
    ) -> Mapping[str, tuple[float, float]]:
        tensor_ranges = self.known_ranges or context.statistics.ranges_of(
            model, values, self.ranges, self.percentile, is_random=context.task.inputs_note() is not None
        )
        missing = [value.name or "" for value in values if value.name not in tensor_ranges.ranges]
        if missing:
            raise InputError(
                "the recipe states no range of a tensor", tensor=missing[0], remedy="leave `known_ranges` out of it"
            )
        kind = "random inputs" if tensor_ranges.is_random else "inputs"
        fact = RANGES(tensors=len(values), samples=tensor_ranges.samples, kind=kind, digest=tensor_ranges.digest[:16])
        context.ledger.report_change("ranges", fact)
        return tensor_ranges.ranges

    def _bias_codes(self, node: ir.Node, step: float) -> _BiasCodes | None:
        """Return the bias of ``node`` in steps of its input's times its weight's; ``None`` where it has none."""
        bias, weight = weight_of(node, 2), weight_of(node, 1)
        if bias is None:
            return None
        assert bias.const_value is not None and weight is not None and weight.const_value is not None
        expression = expression_of(weight.const_value)
        scales = self._codes_and_scales(expression, expression.shape[0], -1)["scales"]
        numbers = np.asarray(bias.const_value.numpy(), np.float64)
        steps = (step * WeightTensor(scales).numpy().ravel().astype(np.float64)).astype(np.float32)
        codes = np.rint(numbers / np.where(steps > 0, steps, 1))
        room = _LARGEST - 255 * 128 * math.prod(expression.shape[1:])
        fits = np.abs(codes).max(initial=0) <= room and not ((steps <= 0) & (numbers != 0)).any()
        return _BiasCodes(codes, steps, bool(fits))


def _has_varying_range(node: ir.Node, context: Context) -> bool:
    """Return whether a convolution reads an input of the graph whose range differs from call to call."""
    return node.inputs[0] is not None and node.inputs[0].name in context.task.varying_ranges


class _BiasCodes(NamedTuple):
    """A bias in steps.

    Attributes:
        codes: whole numbers, float64 [out].
        steps: float32 [out].
        fits: whether the codes, with the sum of products of codes that they are added to, have 32 bits.
    """

    codes: npt.NDArray[np.float64]
    steps: npt.NDArray[np.float32]
    fits: bool


def _store_bias(graph: ir.Graph, node: ir.Node, content: _BiasCodes, ledger: Ledger) -> None:
    """Let ``node`` read its bias from codes."""
    bias = weight_of(node, 2)
    assert bias is not None
    parts = (("codes", content.codes.astype(np.int32)), ("steps", content.steps))
    values = [new_weight(graph, f"{bias.name}.{part}", ir.tensor(array)) for part, array in parts]
    ledger.changed(decode(node, 2, values, {"axis": 0}), BIAS(bias=bias.name), [bias])
    drop(graph, bias)
