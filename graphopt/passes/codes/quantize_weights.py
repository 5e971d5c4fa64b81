"""Weights become codes, scales and perhaps zero points: in standard ONNX where it has the type, else in ours."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import defaultdict
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, TypeAlias

import onnx_ir as ir
from pydantic import BeforeValidator, Field, SerializeAsAny, model_validator

from graphopt.analysis.structure.folding import fold
from graphopt.analysis.structure.ports import HIDDEN
from graphopt.analysis.structure.products import (
    gate_nodes,
    is_thin,
    linear_nodes,
    lm_head_nodes,
    lookups,
    router_nodes,
    token_lookups,
)
from graphopt.analysis.structure.roles import roles_of
from graphopt.graph.diagnostics import Effect, Fact, Rule
from graphopt.graph.editing import drop
from graphopt.graph.weights import WeightTensor, expression_of, new_weight, weight_of
from graphopt.numerics.formats import Format, format_of
from graphopt.passes.base import Pass
from graphopt.passes.common.branches import put_beside
from graphopt.passes.common.formats import (
    Activations,
    EmbeddingFormat,
    GroupedFormat,
    LinearFormat,
    ProductRole,
    check_names,
    fused_group,
)
from graphopt.passes.common.input_rounding import round_input
from graphopt.passes.common.logical_codes import dequantize, set_type
from graphopt.passes.common.tables import STORAGE, quantize_table
from graphopt.passes.common.tied_embedding import look_up_columns, tied_lookups
from graphopt.quantization.rounding import RoundingMethod
from graphopt.quantization.rounding.correction import CorrectedMatrix
from graphopt.quantization.rounding.lazy_codes import quantize_lazily
from graphopt.quantization.rounding.methods import method_of
from graphopt.quantization.rounding.methods.nearest import NEAREST
from graphopt.quantization.rounding.scales import Scale

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from graphopt.graph.weights import Expression
    from graphopt.graph.weights.store import Store
    from graphopt.passes.context import Context, Ledger
    from graphopt.quantization.statistics import InputStatistics

__all__ = ["STATISTICS", "STORAGE", "EmbeddingFormat", "LinearFormat", "QuantizeWeights"]

# Of the types that onnxruntime fuses, those that it has no operator for that looks codes up in the layout of a product.
_NOT_LOOKED_UP = (ir.DataType.INT2, ir.DataType.UINT2)

# Operators whose second input is a weight.
_WEIGHT_OPERATORS = frozenset(("MatMul", "Gemm", "Conv", "ConvTranspose", "LSTM", "GRU", "RNN"))

STATISTICS = Rule(
    "quantize_weights.measured",
    "the inputs of {products} products were collected on {tokens} tokens, with the digest {text}; theirs is {digest}",
)
ROUTER = Rule("quantize_weights.router", "it chooses experts: its few columns stay in floating point")
GATE = Rule(
    "quantize_weights.gate",
    "it makes decays or step sizes of a recurrence, whose errors add up over tokens; `matrices` may name it",
)
GIVES_HIDDEN = Rule(
    "quantize_weights.gives-hidden", "it gives the hidden state that drafts are made by, which codes would blur"
)
THIN = Rule("quantize_weights.thin", "a branch of few directions: codes of it would save nothing")
ALSO_INSIDE = Rule(
    "quantize_weights.also-inside",
    "{op_type} in a branch or loop reads its weight in floats too: codes would be stored beside them",
)
LEFT_IN_FLOATS = Rule("quantize_weights.left", "the recipe leaves it in floating point")
NOT_TOKENS = Rule("quantize_weights.not-tokens", "a table that is not looked up by input_ids")
NO_LOOKUP = Rule(
    "quantize_weights.no-lookup", "it is tied to the lm_head, but onnxruntime looks nothing up in codes of {format}"
)
NO_MATRIX = Rule("quantize_weights.no-matrix", "{op_type} with a weight of shape [{shape}], not a matrix")
IN_SUBGRAPHS = Rule(
    "quantize_weights.in-subgraphs", "the subgraphs of {op_type} hold {numbers} weights, and stay as they are"
)
CHOSEN_TOKENS = Rule(
    "quantize_weights.chosen-tokens",
    "the model chooses experts, and might choose others behind rounded products: inputs are the model's as it is",
)
NOT_FLOAT = Rule("quantize_weights.not-float", "its weight is {type}, and Dequantize makes float")


# What is added to the diagonal of Y^T Y where a matrix makes up for what those before it lost, as a share of its mean:
# more than for GPTQ, since how Y differs from X is seen on few tokens for so many numbers.
_CORRECTION_DAMPING = 0.1


@dataclasses.dataclass(frozen=True)
class _Plan:
    """How a matrix is rounded.

    Attributes:
        choice: its format and group, as they were asked for.
        group: rows that share a scale.
        standard: whether its codes are of a type of ONNX's, in a form that onnxruntime fuses.
        method: chooses its codes.
        has_few_tokens: whether its inputs were seen for too few tokens.
        rank: directions of the branch beside it.
        tensors: its parts, not evaluated yet.
    """

    choice: GroupedFormat
    group: int
    standard: bool
    method: RoundingMethod
    has_few_tokens: bool
    rank: int
    tensors: dict[str, ir.TensorProtocol]

    def is_stored(self, store: Store) -> bool:
        """Return whether all parts that the model will have are stored."""
        parts = (tensor for part, tensor in self.tensors.items() if part != "values")
        return all(store.find(expression_of(tensor)) is not None for tensor in parts)

    def with_stored_parts(self, store: Store) -> _Plan:
        """Return the plan with the tensors that were evaluated when the statistics of later products were collected."""
        if "values" in self.tensors:
            store.discard(expression_of(self.tensors["values"]))
        parts = {part: tensor for part, tensor in self.tensors.items() if part != "values"}
        tensors: dict[str, ir.TensorProtocol] = {
            part: store.obtain(expression_of(tensor)).tensor() for part, tensor in parts.items()
        }
        return dataclasses.replace(self, tensors=tensors)


_PlanOf: TypeAlias = "Callable[[ir.Node, InputStatistics | None], _Plan | None]"


class QuantizeWeights(Pass):
    """Store matrices and the token embedding as codes with a scale per group.

    before::

        y = MatMul(x, W)                                   e = Gather(E, ids)

    after, with groups of rows of W and along the columns of E::

        y = MatMul(x, DequantizeLinear(codes, scales; axis=0, block_size=group))
        e = DequantizeLinear(Gather(codes, ids), Gather(scales, ids); axis=-1)

    or, where ONNX has no type for the codes or onnxruntime fuses no such groups::

        y = MatMul(RoundActivations(x; activations, group), Dequantize(codes, scales, table, zero points; group))

    W is about (value(code) - zero point) x scale, and codes lie as W does, [K, N]: the step ``lower`` packs them. The
    first form is fused by onnxruntime when it loads the model; of the second, a step looks up codes, so that it
    dequantizes the rows it reads and not the whole table; the third says what x is rounded to, once for all products
    that read x. Scales of matrices are rounded to float16 where all of a matrix are normal numbers there, and codes are
    chosen for what is stored. A product that chooses experts is left as it is, and so is one that makes nothing but
    decays and step sizes of recurrences unless ``matrices`` names it.

    With ``low_rank`` a branch in floats makes up for a part of the error (LQER, Zhang et al. 2024)::

        y = Add(MatMul(x, DequantizeLinear(codes, ...)), MatMul(MatMul(x, A), B))          A B is about W - Q

    A token embedding that is tied to the lm_head, E = W^T, is stored once, in the format of the lm_head::

        y = MatMul(x, W)                                   e = Gather(Transpose(W), ids)

    with one W = DequantizeLinear(...) or Dequantize(...) for both. The step ``lower`` makes a lookup of it that reads
    the columns of the tokens alone.

    ``rounding`` names how codes are chosen: ``nearest`` looks at the weight alone; others ask for X^T X of the inputs.
    That is collected by running the graph as it is when this step begins, so after rotations, on the text that the
    recipe names under ``calibration``.

    Formats of matrices, token embedding and lm_head (``None`` leaves one as it is), and how codes are chosen.

    Attributes:
        linear: format of matrices.
        embedding: format of the token embedding, where it is stored apart from the lm_head.
        lm_head: format of the matrix that makes the logits.
        matrices: formats of single matrices by the names of their weights, in place of ``linear`` and ``lm_head``;
            ``graphopt search`` writes them.
        roles: formats of matrices by what they are for, such as ``down_proj``, in place of ``linear``; see
            :mod:`graphopt.analysis.structure.roles`.
        tied: whether a token embedding that is the transposed lm_head is looked up in the codes of the lm_head, so that
            both are stored once. ``embedding`` must not be ``None``; its format is then that of the lm_head.
        scale: how scales are chosen, see :func:`graphopt.quantization.rounding.round_to_nearest`.
        rounding: how codes of matrices and lm_head are chosen: a method of
        :mod:`graphopt.quantization.rounding.methods`, by its
            name or with options. The token embedding is rounded to nearest: it is looked up, not multiplied.
        fewest_tokens: a product whose inputs were seen for fewer tokens, such as an expert that is seldom chosen, is
            rounded to nearest.
        low_rank: directions of what rounding a matrix loses, W - Q, that stand beside it in float16; 0 for none. The
            lm_head has none. They are chosen by X^T X of the inputs, whatever the method, see
            :mod:`graphopt.quantization.rounding.low_rank`.
        inputs: which inputs ``rounding`` sees: those of the model as it is, or, one product after the other, those that
            it will have behind products that are ``rounded`` already. It then makes up for what these lost, see
            :mod:`graphopt.quantization.rounding.correction`; the model is run twice for that, and in one
            process, also with a cluster. Where a model chooses experts, inputs are those of the model as it is.
        activations: what the inputs of products are rounded to where ONNX has no form for their weights; ``None`` for
            what the recipe says. It is a part of the graph. For the standard form it is a session entry of
            onnxruntime: see ``activations`` of the recipe.
    """

    name: ClassVar[str] = "quantize_weights"
    effect: ClassVar[Effect] = "lossy"
    after: ClassVar[tuple[str, ...]] = (
        "unpack",
        "keep_codes",
        "spare_inputs",
        "quantize_convolutions",
        "compress_weights",
    )

    linear: LinearFormat | None = LinearFormat()
    embedding: EmbeddingFormat | None = EmbeddingFormat()
    lm_head: LinearFormat | None = LinearFormat(format="int8", group=128)
    matrices: dict[str, LinearFormat | None] = Field(default={})
    roles: dict[ProductRole, LinearFormat | None] = Field(default={})
    tied: bool = True
    scale: Scale = "least_squares"
    rounding: Annotated[SerializeAsAny[RoundingMethod], BeforeValidator(method_of)] = NEAREST
    fewest_tokens: Annotated[int, Field(ge=0)] = 256
    low_rank: Annotated[int, Field(ge=0, le=512)] = 0
    inputs: Literal["original", "rounded"] = "original"
    activations: Activations | None = None

    @model_validator(mode="after")
    def _one_way_to_make_up(self) -> QuantizeWeights:
        if self.low_rank and self.inputs == "rounded":
            raise ValueError("low_rank makes up for errors of its own product: it goes with inputs: original")
        return self

    def rewrite(self, model: ir.Model, context: Context) -> None:
        """Quantize what the options name; say why anything else with weights stays."""
        ledger = context.ledger
        graph = model.graph
        tokens = set(token_lookups(graph))
        tied = self._tied_lookups(graph)
        options = self
        products = self._formats_of_products(graph, ledger)
        plan_of = self._planner(graph, products, context)
        statistics, store = self._collect(model, products, plan_of, context)
        for node, format_choice in products.items():
            target_format = format_choice.for_target(context.target, context.instructions)
            in_place = None if target_format is format_choice else format_of(format_choice.format).name
            inputs, lookups_of = statistics.get(node), tied.get(node, ())
            plan = plan_of(node, inputs)
            if plan is None:
                ledger.skipped(node, NOT_FLOAT(type=_type_of_weight(node)))
            else:
                plan = plan if store is None else plan.with_stored_parts(store)
                self._quantize_matrix(graph, node, plan, inputs, ledger, lookups_of, in_place=in_place)
        for node in lookups(graph):
            if node not in tokens:
                ledger.skipped(node, NOT_TOKENS())
            elif self.embedding is None:
                ledger.skipped(node, LEFT_IN_FLOATS())
            else:
                quantize_table(graph, node, self.embedding, options.scale, ledger)
        remaining = set(linear_nodes(graph))
        for node in graph:
            matrix = weight_of(node, 1) if node.op_type in _WEIGHT_OPERATORS else None
            if matrix is not None and node not in remaining:
                ledger.skipped(node, NO_MATRIX(op_type=node.op_type, shape=[str(dim) for dim in matrix.shape or ()]))
            numbers = _numbers_in_subgraphs(node)
            if numbers:
                ledger.skipped(node, IN_SUBGRAPHS(op_type=node.op_type, numbers=numbers))

    def _formats_of_products(self, graph: ir.Graph, ledger: Ledger) -> dict[ir.Node, LinearFormat]:
        """Return the format of each product that gets codes; say why others do not."""
        lm_heads, routers, gates = lm_head_nodes(graph), router_nodes(graph), gate_nodes(graph)
        check_names(self.matrices, [weight_of(node, 1) for node in linear_nodes(graph)])
        products: dict[ir.Node, LinearFormat] = {}
        for node, format_choice in self.formats_by_product(graph).items():
            weight = weight_of(node, 1)
            assert weight is not None
            if node in routers - lm_heads:
                ledger.skipped(node, ROUTER())
            elif format_choice is None:
                ledger.skipped(node, LEFT_IN_FLOATS())
            elif node in gates and weight.name not in self.matrices:
                ledger.skipped(node, GATE())
            elif node.outputs[0].name == HIDDEN and node.outputs[0].is_graph_output():
                ledger.skipped(node, GIVES_HIDDEN())
            elif is_thin(weight):
                ledger.skipped(node, THIN())
            elif inner_readers := [use.node for use in weight.uses() if use.node.graph is not graph]:
                ledger.skipped(node, ALSO_INSIDE(op_type=inner_readers[0].op_type))
            else:
                products[node] = format_choice
        return products

    def formats_by_product(self, graph: ir.Graph) -> dict[ir.Node, LinearFormat | None]:
        """Return what the options say of each product, whatever it is for; ``None`` leaves it in floating point."""
        lm_heads, formats = lm_head_nodes(graph), dict[ir.Node, LinearFormat | None]()
        of_roles: Mapping[str, LinearFormat | None] = {str(role): choice for role, choice in self.roles.items()}
        roles = roles_of(graph, fold(graph)) if of_roles else defaultdict(str)
        for node in linear_nodes(graph):
            weight = weight_of(node, 1)
            assert weight is not None
            default_format = self.lm_head if node in lm_heads else of_roles.get(roles[node], self.linear)
            formats[node] = self.matrices.get(weight.name or "", default_format)
        return formats

    def _tied_lookups(self, graph: ir.Graph) -> dict[ir.Node, list[ir.Node]]:
        return tied_lookups(graph) if self.tied and self.embedding is not None else {}

    def _planner(self, graph: ir.Graph, products: Mapping[ir.Node, LinearFormat], context: Context) -> _PlanOf:
        """Return what says how a product is rounded, given what its inputs look like; it remembers what it said."""
        lm_heads, tied, plans = lm_head_nodes(graph), self._tied_lookups(graph), dict[object, _Plan | None]()
        in_sequence = self._needs_statistics(products) and self._is_in_sequence(graph)

        def plan_of(node: ir.Node, statistics: InputStatistics | None) -> _Plan | None:
            key = node, None if statistics is None else (statistics.digest, statistics.shift_digest)
            if key not in plans:
                plans[key] = self._plan(
                    graph,
                    node,
                    products[node].for_target(context.target, context.instructions),
                    statistics,
                    0 if node in lm_heads else self.low_rank,
                    corrects=not tied.get(node),
                    # Nothing is behind a product that makes an output alone.
                    with_values=in_sequence and bool(not node.outputs[0].is_graph_output() or node.outputs[0].uses()),
                )
            return plans[key]

        return plan_of

    def _needs_statistics(self, products: Mapping[ir.Node, LinearFormat]) -> bool:
        return bool(products) and (self.rounding.needs is not None or bool(self.low_rank))

    def _is_in_sequence(self, graph: ir.Graph) -> bool:
        return self.inputs == "rounded" and not router_nodes(graph) - lm_head_nodes(graph)

    def _collect(
        self, model: ir.Model, products: Mapping[ir.Node, LinearFormat], plan_of: _PlanOf, context: Context
    ) -> tuple[Mapping[ir.Node, InputStatistics], Store | None]:
        """Return what the inputs of products look like; and where their codes lie, if they were rounded on the way."""
        if not self._needs_statistics(products):
            return {}, None
        statistics: Mapping[ir.Node, InputStatistics]
        store: Store | None
        if self._is_in_sequence(model.graph):
            statistics, store = self._round_in_sequence(model, products, plan_of, context)
        else:

            def expressions_of(node: ir.Node, inputs: InputStatistics) -> list[Expression]:
                plan = plan_of(node, inputs)
                return [] if plan is None else [expression_of(tensor) for tensor in plan.tensors.values()]

            statistics, store = context.statistics.inputs(model, products, expressions_of), context.statistics.store
            if self.inputs == "rounded":
                context.ledger.report_change("statistics", CHOSEN_TOKENS())
        context.ledger.report_change("statistics", _statistics_fact(statistics.values()))
        note = context.task.inputs_note()
        if note is not None:
            context.ledger.report_change("statistics", note)
        return statistics, store

    def _round_in_sequence(
        self, model: ir.Model, products: Mapping[ir.Node, LinearFormat], plan_of: _PlanOf, context: Context
    ) -> tuple[Mapping[ir.Node, InputStatistics], Store]:
        """Round products one after the other; return what each saw, and where its codes lie."""
        store = context.statistics.rounded_matrices()

        def round_product(node: ir.Node, statistics: InputStatistics) -> ir.TensorProtocol | None:
            plan = plan_of(node, statistics)
            if plan is None:
                return None
            if "values" not in plan.tensors:
                store.obtain(expression_of(plan.tensors["codes"]))
                return None
            return store.obtain(expression_of(plan.tensors["values"])).tensor()

        def is_rounded(node: ir.Node, statistics: InputStatistics) -> bool:
            plan = plan_of(node, statistics)
            return plan is None or plan.is_stored(store)

        settings = f"{self.model_dump_json()} {context.target}"
        statistics = context.statistics.inputs_in_sequence(model, products, settings, round_product, is_rounded)
        return statistics, store

    def _plan(
        self,
        graph: ir.Graph,
        node: ir.Node,
        format_choice: GroupedFormat,
        statistics: InputStatistics | None,
        rank: int,
        *,
        corrects: bool,
        with_values: bool,
    ) -> _Plan | None:
        """Return how a matrix will be rounded; ``None`` for one of another type that onnxruntime has no form for.

        Args:
            graph: the graph.
            node: the product.
            format_choice: its format and group.
            statistics: of its inputs, where they were collected.
            rank: directions of the branch beside it.
            corrects: whether the matrix makes up for what those before it lost. One that is a token embedding, too,
                does not: tokens are looked up in it.
            with_values: whether the matrix that the codes mean is one of the parts.
        """
        weight, format = weight_of(node, 1), format_of(format_choice.format)
        assert weight is not None and weight.const_value is not None
        rows = weight.const_value.shape.numpy()[0]
        fused_format = fused_group(format, format_choice, rows, graph.opset_imports[""])
        if fused_format is None and weight.dtype != ir.DataType.FLOAT:
            return None
        group, matrix = fused_format or min(format_choice.group or rows, rows), weight.const_value
        has_few_tokens = statistics is not None and statistics.tokens < max(1, self.fewest_tokens)
        method = NEAREST if has_few_tokens else self.rounding
        inputs, shift = None, None
        if statistics is not None and not has_few_tokens:
            inputs, shift = statistics.hessian(), statistics.shift()
        if inputs is not None and shift is not None and corrects:
            matrix = WeightTensor(CorrectedMatrix(expression_of(matrix), inputs, shift, _CORRECTION_DAMPING))
        rank = 0 if inputs is None else min(rank, *weight.const_value.shape.numpy())
        tensors = quantize_lazily(
            matrix,
            format,
            group,
            self.scale,
            half=True,
            standard=fused_format is not None,
            method=method,
            statistics=None if method.needs is None else inputs,
            low_rank=rank,
            inputs=inputs,
            with_values=with_values,
        )
        return _Plan(format_choice, group, fused_format is not None, method, has_few_tokens, rank, tensors)

    def ensures(self, model: ir.Model) -> None:
        """Promise also that no original weight is left in the file beside its codes."""
        super().ensures(model)
        initializers = model.graph.initializers
        remaining = [name for name in initializers if f"{name}.codes" in initializers and not initializers[name].uses()]
        if remaining:
            raise ir.passes.PostconditionError(f"{self.name} left originals beside their codes: {', '.join(remaining)}")

    def _quantize_matrix(
        self,
        graph: ir.Graph,
        node: ir.Node,
        plan: _Plan,
        statistics: InputStatistics | None,
        ledger: Ledger,
        tied: Sequence[ir.Node],
        *,
        in_place: str | None,
    ) -> None:
        weight, format_choice = weight_of(node, 1), plan.choice
        assert weight is not None and weight.const_value is not None
        rows, format = weight.const_value.shape.numpy()[0], format_of(format_choice.format)
        group, rounding, standard, method = plan.group, self.rounding, plan.standard, plan.method
        has_few_tokens, rank, tensors = plan.has_few_tokens, plan.rank, plan.tensors
        parts = {part: new_weight(graph, f"{weight.name}.{part}", tensor) for part, tensor in tensors.items()}
        branch = [parts.pop(part) for part in ("left", "right") if part in parts]
        reader = _dequantize_linear(node, parts, group) if standard else _dequantize(graph, node, parts, group, format)
        set_type(reader.outputs[0], f"{weight.name}.dequantized", weight.dtype, weight.const_value.shape.numpy())
        graph.insert_before(node, reader)
        node.replace_input_with(1, reader.outputs[0])
        fact = STORAGE(
            weight=weight.name,
            format=format.name,
            group=group if standard or group < rows else None,
            per_column=not standard and group >= rows,
            asked=format_choice.group if standard and group != format_choice.group else None,
            rows=rows if standard else None,
            rounding=None if method == NEAREST else method.method,
            in_place=in_place,
            few=statistics.tokens if statistics is not None and has_few_tokens else None,
            rounding_asked=rounding.method if has_few_tokens else None,
            dead=None if statistics is None or has_few_tokens else statistics.dead or None,
            tokens=None if statistics is None else statistics.tokens,
            beside=rank or None,
        )
        ledger.changed(reader, fact, [weight])
        for lookup in tied:
            if standard and format.onnx_type in _NOT_LOOKED_UP:
                ledger.skipped(lookup, NO_LOOKUP(format=format.name))
            else:
                look_up_columns(graph, lookup, reader, weight, ledger)
        if branch:
            put_beside(graph, node, weight, (branch[0], branch[1]), ledger)
        drop(graph, weight)
        activations = self.activations or "int8"
        if not standard and activations != "float32":
            round_input(graph, node, {"activations": activations, "group": group, "clip": 1.0}, ledger)


def _type_of_weight(node: ir.Node) -> str:
    weight = weight_of(node, 1)
    return str(None if weight is None else weight.dtype)


def _numbers_in_subgraphs(node: ir.Node) -> int:
    """Return how many floating-point weights the subgraphs of a node hold."""
    graphs: list[ir.Graph] = []
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            graphs.append(attribute.as_graph())
        elif attribute.type == ir.AttributeType.GRAPHS:
            graphs += attribute.as_graphs()
    inner_graphs = [inner for graph in graphs for inner in (graph, *graph.subgraphs())]
    tensors = [value.const_value for graph in inner_graphs for value in graph.initializers.values()]
    return sum(tensor.size for tensor in tensors if tensor is not None and tensor.dtype.is_floating_point())


def _statistics_fact(inputs: Iterable[InputStatistics]) -> Fact:
    samples = list({sample.value: sample for sample in inputs}.values())
    digest = hashlib.sha256("".join(sample.digest for sample in samples).encode()).hexdigest()
    tokens = max(sample.tokens for sample in samples)
    return STATISTICS(products=len(samples), tokens=tokens, text=samples[0].text[:16], digest=digest[:16])


def _dequantize_linear(product: ir.Node, parts: Mapping[str, ir.Value], group: int) -> ir.Node:
    attributes = {"axis": 0, "block_size": group}
    return ir.node("DequantizeLinear", [*parts.values()], attributes, name=f"{product.name}.dequantize")


def _dequantize(
    graph: ir.Graph, product: ir.Node, parts: Mapping[str, ir.Value], group: int, format: Format
) -> ir.Node:
    return dequantize(graph, product, parts["codes"], parts["scales"], format, parts.get("zero_points"), group)
