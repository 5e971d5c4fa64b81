"""What each phase keeps: a pass that breaks an invariant is refused, a model that came in so is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import numpy as np
import onnx_ir as ir
import pytest

from graphopt.errors import VerificationError
from graphopt.graph.diagnostics import Effect
from graphopt.passes.base import Pass, PassResult
from graphopt.passes.codes.quantize_weights import LinearFormat
from graphopt.passes.context import Context, make_context
from graphopt.passes.phases import INVARIANTS, PHASES, Phase, breaches
from graphopt.runtime_ops import DOMAIN, OPERATORS
from graphopt.tasks import task_of
from graphopt.verification.steps import run_passes
from tests.graphs import canonical, residual_model, run_pass

Change = Callable[[ir.Model], object]


class Careless(Pass):
    """Do to a model what no pass of a phase may do; behind its own end, where `declare` would mend a missing body."""

    name: ClassVar[str] = "careless"
    effect: ClassVar[Effect] = "exact"
    within: ClassVar[Phase] = "codes"
    change: Change

    @classmethod
    def phase(cls) -> Phase:
        return cls.within

    def rewrite(self, model: ir.Model, context: Context) -> None:
        pass

    def call(self, model: ir.Model) -> PassResult:
        result = super().call(model)
        self.change(model)
        return result


class InLower(Careless):
    """The same in the last phase."""

    within: ClassVar[Phase] = "lower"


def run(model: ir.Model, change: Change, kind: type[Careless] = Careless) -> None:
    list(run_passes(model, [kind(change=change)], make_context(task_of(model.graph)), on_pass=lambda step: None))


def quantized(fmt: str = "fp6-e2m3") -> ir.Model:
    """Return a model whose products have logical codes and rounded inputs, and whose table has codes behind Gather."""
    model = residual_model(width=32, inner=48)
    wanted = LinearFormat(format=fmt, group=16)
    run_pass(model, "quantize_weights", linear=wanted, lm_head=wanted, activations="int8")
    return model


def add(model: ir.Model, op_type: str, domain: str = "", name: str = "odd") -> ir.Node:
    """Put a node that nothing reads behind the first one."""
    first = model.graph[0]
    node = ir.node(op_type, [first.outputs[0]], domain=domain, name=name)
    node.outputs[0].name = f"{name}.out"
    model.graph.insert_after(first, node)
    return node


def pack(model: ir.Model) -> None:
    copy = model.clone()
    run_pass(copy, "lower")
    packed = next(node for node in copy.graph if node.op_type == "MatMulTable")
    node = next(node for node in model.graph if node.name == packed.name)
    values = [ir.val(f"packed.{n}", const_value=v.const_value) for n, v in enumerate(packed.inputs[1:])]
    for value in values:
        model.graph.register_initializer(value)
    attributes = {name: attribute.value for name, attribute in packed.attributes.items()}
    new = OPERATORS["MatMulTable"].node([node.inputs[0], *values], attributes, name="packed")
    new.outputs[0].name = "packed.out"
    model.graph.insert_before(node, new)
    model.functions.update({key: body for key, body in copy.functions.items() if key[1] == "MatMulTable"})


def read_by(op_type: str, index: int) -> Change:
    """Return a change that lets a node of another kind read what the first ``op_type`` makes."""

    def change(model: ir.Model) -> None:
        node = next(node for node in model.graph if node.op_type == op_type)
        other = ir.node("Neg", [node.outputs[0]], name="odd")
        other.outputs[0].name = "odd.out"
        reader = node.outputs[0].uses()[0].node
        model.graph.insert_before(reader, other)
        if index >= 0:
            reader.replace_input_with(index, other.outputs[0])

    return change


def without_bodies(model: ir.Model) -> None:
    model.functions.clear()


def forget_shape(model: ir.Model) -> None:
    model.graph.outputs[0].shape = None


def older_opset(model: ir.Model) -> None:
    model.graph.opset_imports[""] = 22


BROKEN: dict[str, list[tuple[Change, str, type[Careless]]]] = {
    "canonical opset": [(older_opset, "the model does not keep", Careless), (older_opset, "the phase lower", InLower)],
    "standard operators": [
        (lambda model: add(model, "NoSuchOperator"), "ONNX::NoSuchOperator.*node=odd", Careless),
        (lambda model: add(model, "Swish"), "ONNX::Swish", InLower),  # of opset 24
    ],
    "bodies travel along": [
        (without_bodies, "ai.graphopt::.*does not keep", Careless),
        (lambda model: add(model, "Unheard", DOMAIN), "ai.graphopt::Unheard.*node=odd", InLower),
    ],
    "no foreign operators": [(lambda model: add(model, "Gelu", "com.microsoft"), "microsoft::Gelu", Careless)],
    "ports are stated": [(forget_shape, "ONNX::", InLower)],
    "no packed codes": [(pack, "ai.graphopt::MatMulTable.*node=packed", Careless)],
    "codes are logical": [
        (read_by("Dequantize", -1), "ai.graphopt::Dequantize", Careless),
        (read_by("Dequantize", 1), "ai.graphopt::Dequantize", Careless),
        (
            lambda model: model.graph.outputs.append(
                next(node for node in model.graph if node.op_type == "Dequantize").outputs[0]
            ),
            "ai.graphopt::Dequantize",
            Careless,
        ),
    ],
    "roundings serve products": [(read_by("RoundActivations", 0), "ai.graphopt::RoundActivations", Careless)],
}

CASES = [(name, *case) for name, cases in BROKEN.items() for case in cases]


def test_every_invariant_is_broken_by_a_case() -> None:
    assert {rule.name for rule in INVARIANTS} == BROKEN.keys()


@pytest.mark.parametrize(("name", "change", "words", "kind"), CASES)
def test_a_pass_that_breaks_an_invariant_is_refused(
    name: str, change: Change, words: str, kind: type[Careless]
) -> None:
    with pytest.raises(VerificationError, match=f"careless broke the invariant '{name}' of the phase.*") as caught:
        run(quantized(), change, kind)
    assert caught.match(words)


# A missing body is mended behind each pass, and another opset is refused by each but those that raise it.
LET_IN = [case for case in CASES if case[0] not in ("canonical opset", "bodies travel along")]


@pytest.mark.parametrize(("name", "change", "words", "kind"), LET_IN)
def test_a_model_that_came_in_so_is_let_through(name: str, change: Change, words: str, kind: type[Careless]) -> None:
    model = quantized()
    change(model)
    assert name in {rule.name for rule, _ in breaches(model, kind.within).in_graph}
    run(model, lambda model: add(model, "Relu", name="new"), kind)


def test_what_the_last_phase_is_for_is_allowed_there() -> None:
    run(quantized(), pack, InLower)
    run(quantized(), lambda model: add(model, "Gelu", "com.microsoft"), InLower)


def test_a_node_that_was_made_again_is_known_by_what_it_makes() -> None:
    model = quantized()
    add(model, "Gelu", "com.microsoft")

    def again(model: ir.Model) -> None:
        model.graph.remove(next(node for node in model.graph if node.op_type == "Gelu"))
        add(model, "Gelu", "com.microsoft").name = "another"

    run(model, again)


def test_a_body_that_is_inlined_brings_nothing_new() -> None:
    model, x = quantized(), ir.val("x")
    inner = ir.node("Gelu", [x], domain="com.microsoft", name="inner")
    inner.outputs[0].name = "y"
    body = ir.Graph([x], inner.outputs, nodes=[inner], opset_imports={"com.microsoft": 1}, name="body")
    function = ir.Function("local", "Odd", graph=body, attributes=[])
    model.functions[function.identifier()] = function
    run(model, lambda model: add(model, "Odd", "local"))
    run(model, lambda model: add(model, "Gelu", "com.microsoft", "inlined"))
    with pytest.raises(VerificationError, match="microsoft::Attention"):
        run(model, lambda model: add(model, "Attention", "com.microsoft", "new"))


@pytest.mark.parametrize("phase", PHASES[:-1])
def test_an_exported_model_keeps_all_of_it(llama_artifact: Path, phase: Phase) -> None:
    model = canonical(llama_artifact)
    assert breaches(model, phase).in_graph == []
    for name in ("fold_norms", "rotate", "quantize_weights", "quantize_activations", "quantize_kv"):
        run_pass(model, name)
    assert breaches(model, phase).in_graph == []


def test_rows_of_codes_are_looked_up_in_front_of_the_node_that_dequantizes_them() -> None:
    model = quantized("int4")
    nodes = [node for node in model.graph if node.op_type == "DequantizeLinear"]
    kinds = [node.inputs[0].producer() for node in nodes]
    assert sum(producer is not None and producer.op_type == "Gather" for producer in kinds) == 1
    assert breaches(model, "codes").in_graph == []
    node = next(
        node for node in model.graph if node.op_type == "DequantizeLinear" and node.inputs[0].producer() is None
    )
    node.outputs[0].uses()[0].node.replace_input_with(0, node.outputs[0])
    assert [(rule.name, each) for rule, each in breaches(model, "codes").in_graph] == [("codes are logical", node)]
    assert np.prod(node.outputs[0].shape.numpy()) > 1
