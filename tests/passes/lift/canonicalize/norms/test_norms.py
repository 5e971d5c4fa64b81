"""Norms in every spelling that exporters are known for, and what only looks like one."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx_ir.passes.common import RemoveUnusedNodesPass

from graphopt.graph.diagnostics import PassReport
from graphopt.ort.runner import Runner
from graphopt.passes.context import make_context
from graphopt.passes.lift.canonicalize.norms import lift_norms
from graphopt.tasks import TASKS

N = 24
RANDOM = np.random.default_rng(0)
GAIN = RANDOM.uniform(0.5, 1.5, N).astype(np.float32)
BIAS = RANDOM.standard_normal(N).astype(np.float32)
F16, F32, F64 = ir.DataType.FLOAT16, ir.DataType.FLOAT, ir.DataType.DOUBLE
# A sum of N squares is off by N 2^-24 of itself at most, and half of that in its root; besides, 8 operations.
FLOAT32 = (N / 2 + 8) * 2.0**-24


class Speller:
    """Writes a graph down from ``x`` [batch, length, N]: operators by name, constants as arrays and numbers."""

    def __init__(self, dtype: ir.DataType = F32, shape: tuple[int | str, ...] = ("batch", "length", N)) -> None:
        self.x, self.dtype = ir.val("x", dtype, shape), dtype
        self.nodes: list[ir.Node] = []
        self.constants: list[ir.Value] = []

    def __getattr__(self, op_type: str) -> Callable[..., ir.Value]:
        def op(*inputs: Any, dtype: ir.DataType | None = None, **attributes: Any) -> ir.Value:
            whole = [each for each in inputs if isinstance(each, ir.Value)]
            like = whole[0].dtype
            values = [self._value(each, like) for each in inputs]
            node = ir.node(op_type, values, attributes or None, name=f"{op_type.lower()}{len(self.nodes)}")
            node.outputs[0].name, node.outputs[0].dtype = f"{node.name}.out", dtype or like
            if not op_type.startswith(("Reduce", "Unsqueeze")):
                node.outputs[0].shape = next((each.shape for each in whole if each.shape is not None), None)
            self.nodes.append(node)
            return node.outputs[0]

        return op

    def cast(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        return self.Cast(value, to=dtype, dtype=dtype)

    def mean(self, value: ir.Value, axis: int = -1, **attributes: Any) -> ir.Value:
        return self.ReduceMean(value, np.array([axis]), **attributes)

    def _value(self, given: Any, like: ir.DataType) -> ir.Value:
        if isinstance(given, ir.Value):
            return given
        array = np.asarray(given)
        if array.dtype.kind == "f" and array.dtype != np.float32:
            array = array.astype(like.numpy())
        self.constants.append(ir.val(f"c{len(self.constants)}", const_value=ir.tensor(array)))
        self.constants[-1].const_value.name = self.constants[-1].name
        return self.constants[-1]

    def model(self, *outputs: ir.Value) -> ir.Model:
        outputs[0].shape = self.x.shape
        graph = ir.Graph(
            [self.x], outputs, nodes=self.nodes, initializers=self.constants, opset_imports={"": 23}, name="norm"
        )
        model = ir.Model(graph, ir_version=10)
        RemoveUnusedNodesPass()(model)
        return model


def rms(x: npt.NDArray[Any], gain: npt.NDArray[Any] = GAIN, epsilon: float = 1e-5) -> npt.NDArray[np.float64]:
    wide = x.astype(np.float64)
    return wide / np.sqrt((wide**2).mean(-1, keepdims=True) + epsilon) * gain.astype(np.float64)


def layer(x: npt.NDArray[Any], gain: npt.NDArray[Any] = GAIN, bias: npt.NDArray[Any] = BIAS) -> npt.NDArray[np.float64]:
    wide = x.astype(np.float64)
    return rms(wide - wide.mean(-1, keepdims=True), gain) + bias


def run(model: ir.Model, x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


def lifted(model: ir.Model) -> PassReport:
    report = PassReport(name="canonicalize", effect="exact")
    lift_norms(model, make_context(TASKS["causal_lm"]).of_pass(report))
    return report


def root(s: Speller, x: ir.Value, epsilon: float = 1e-5) -> ir.Value:
    return s.Sqrt(s.Add(s.mean(s.Pow(x, 2.0)), epsilon))


def llama(s: Speller) -> ir.Value:
    """LlamaRMSNorm: to float32, back, the gain behind the cast."""
    wide = s.cast(s.x, F32)
    return s.Mul(GAIN, s.cast(s.Mul(wide, s.Reciprocal(root(s, wide))), s.dtype))


def gemma(s: Speller) -> ir.Value:
    """Gemma3RMSNorm: the gain as 1 + w, in front of the cast back; the root as a power."""
    wide = s.cast(s.x, F32)
    normed = s.Mul(wide, s.Pow(s.Add(s.mean(s.Pow(wide, 2.0)), 1e-5), -0.5))
    return s.cast(s.Mul(normed, s.Add(s.Identity(s._value(GAIN - 1, F32), dtype=F32), 1.0)), s.dtype)


def divided(s: Speller) -> ir.Value:
    return s.Mul(s.Div(s.x, root(s, s.x)), GAIN)


def one_over(s: Speller) -> ir.Value:
    return s.Mul(s.Mul(s.x, s.Div(s._value(1.0, F32), root(s, s.x))), GAIN)


def product_with_itself(s: Speller) -> ir.Value:
    return s.Mul(s.Div(s.x, s.Sqrt(s.Add(1e-5, s.mean(s.Mul(s.x, s.x))))), GAIN)


def gain_first(s: Speller) -> ir.Value:
    return s.Mul(s.Mul(s.x, GAIN), s.Reciprocal(root(s, s.x)))


def gain_over_root(s: Speller) -> ir.Value:
    return s.Mul(s.Div(s._value(GAIN, F32), root(s, s.x)), s.x)


def sum_of_squares(s: Speller) -> ir.Value:
    mean = s.Div(s.ReduceSumSquare(s.x, np.array([-1])), float(N))
    return s.Mul(s.Div(s.x, s.Sqrt(s.Add(mean, 1e-5))), GAIN)


def sum_times_share(s: Speller) -> ir.Value:
    mean = s.Mul(s.ReduceSum(s.Mul(s.x, s.x), np.array([2])), 1 / N)
    return s.Mul(s.Div(s.x, s.Sqrt(s.Add(mean, 1e-5))), GAIN)


def length_squared(s: Speller) -> ir.Value:
    length = s.ReduceL2(s.x, np.array([-1]))
    return s.Mul(s.Div(s.x, s.Sqrt(s.Add(s.Div(s.Mul(length, length), float(N)), 1e-5))), GAIN)


def axis_put_back(s: Speller) -> ir.Value:
    mean = s.Unsqueeze(s.mean(s.Pow(s.x, 2.0), keepdims=0), np.array([-1]))
    return s.Mul(s.Div(s.x, s.Sqrt(s.Add(mean, 1e-5))), GAIN)


def scaled_length(s: Speller) -> ir.Value:
    """L2 normalization with its epsilon inside the root is the same function, with gains of 1 / sqrt(N)."""
    length = s.Sqrt(s.Add(s.ReduceSumSquare(s.x, np.array([-1])), 1e-5 * N))
    return s.Mul(s.Div(s.x, length), GAIN * np.float32(np.sqrt(N)))


RMS = [
    llama,
    gemma,
    divided,
    one_over,
    product_with_itself,
    gain_first,
    gain_over_root,
    sum_of_squares,
    sum_times_share,
    length_squared,
    axis_put_back,
    scaled_length,
]


def centered(s: Speller, x: ir.Value) -> ir.Value:
    return s.Sub(x, s.mean(x))


def spelled_out(s: Speller) -> ir.Value:
    d = centered(s, s.x)
    return s.Add(s.Mul(s.Div(d, root(s, d)), GAIN), BIAS)


def bias_first(s: Speller) -> ir.Value:
    d = centered(s, s.x)
    return s.Add(BIAS, s.Mul(GAIN, s.Mul(d, s.Reciprocal(root(s, d)))))


def twice_centered(s: Speller) -> ir.Value:
    """As onnx's own function body has it: the deviation is computed from another difference than the numerator."""
    return s.Add(s.Mul(s.Div(centered(s, s.x), root(s, s.Sub(s.x, s.mean(s.x)))), GAIN), BIAS)


def unbiased_deviation(s: Speller) -> ir.Value:
    d = centered(s, s.x)
    variance = s.Div(s.ReduceSum(s.Mul(d, d), np.array([-1])), N - 1.0)
    share = np.sqrt(N / (N - 1))
    return s.Add(s.Mul(s.Div(d, s.Sqrt(s.Add(variance, 1e-5 * N / (N - 1)))), (GAIN * share).astype(np.float32)), BIAS)


def mean_in_front_of_the_norm(s: Speller) -> ir.Value:
    """Cohere's, with a bias."""
    return s.Add(s.RMSNormalization(centered(s, s.x), GAIN, axis=-1, epsilon=1e-5), BIAS)


def bias_behind_the_norm(s: Speller) -> ir.Value:
    return s.Add(s.LayerNormalization(s.x, GAIN, axis=-1, epsilon=1e-5), BIAS)


def gain_behind_the_norm(s: Speller) -> ir.Value:
    return s.Add(s.Mul(s.LayerNormalization(s.x, np.ones(N, np.float32), axis=-1, epsilon=1e-5), GAIN), BIAS)


LAYER = [
    spelled_out,
    bias_first,
    twice_centered,
    unbiased_deviation,
    mean_in_front_of_the_norm,
    bias_behind_the_norm,
    gain_behind_the_norm,
]


@pytest.mark.parametrize("spell", [*RMS, *LAYER], ids=lambda spell: spell.__name__)
def test_every_spelling_becomes_the_one_op(spell: Callable[[Speller], ir.Value]) -> None:
    s = Speller()
    model = s.model(spell(s))
    x = (RANDOM.standard_normal((3, 5, N)) * np.array([1e-3, 1.0, 1e3])[:, None, None]).astype(np.float32)
    before, name = run(model, x), model.graph.outputs[0].name
    report = lifted(model)
    kind, reference = ("RMSNormalization", rms) if spell in RMS else ("LayerNormalization", layer)
    assert [node.op_type for node in model.graph] == [kind]
    assert [change.where for change in report.changes] == [model.graph[0].name]
    assert not report.skips
    assert model.graph.outputs[0].name == name
    after, expected = run(model, x), reference(x)
    bound = FLOAT32 * (np.abs(expected) + np.abs(expected).max(-1, keepdims=True))
    assert (np.abs(after - expected) <= bound).all()
    assert (np.abs(after - before) <= 2 * bound).all()
    node = model.graph[0]
    np.testing.assert_allclose(node.inputs[1].const_value.numpy(), GAIN, rtol=2.0**-23)
    assert node.attributes.get_float("epsilon") == pytest.approx(1e-5, rel=1e-6)
    if kind == "LayerNormalization":
        np.testing.assert_allclose(node.inputs[2].const_value.numpy(), BIAS, rtol=2.0**-23, atol=1e-7)


def test_a_stored_gain_stays_the_weight_that_it_is() -> None:
    s = Speller()
    model = s.model(divided(s))
    gain = next(value for value in s.constants if value.const_value.size == N)
    lifted(model)
    assert model.graph[0].inputs[1] is gain
    assert list(model.graph.initializers) == [gain.name]


@pytest.mark.parametrize("spell", [llama, gemma])
def test_casts_around_a_norm_in_float16_go_with_it(spell: Callable[[Speller], ir.Value]) -> None:
    s = Speller(F16)
    if spell is llama:
        wide = s.cast(s.x, F32)
        y = s.Mul(s.cast(s.Mul(wide, s.Reciprocal(root(s, wide))), F16), GAIN.astype(np.float16))
    else:
        y = gemma(s)
    model = s.model(y)
    lifted(model)
    (node,) = model.graph
    assert (node.op_type, node.inputs[0].name, node.inputs[1].dtype) == ("RMSNormalization", "x", F16)
    np.testing.assert_allclose(node.inputs[1].const_value.numpy(), GAIN, rtol=2.0**-10)


def floor_under_the_length(s: Speller) -> ir.Value:
    """torch.nn.functional.normalize."""
    return s.Div(s.x, s.Max(s.ReduceL2(s.x, np.array([-1])), 1e-12))


def length_without_epsilon(s: Speller) -> ir.Value:
    return s.Div(s.x, s.Add(s.ReduceL2(s.x, np.array([-1])), 1e-6))


def epsilon_outside(s: Speller) -> ir.Value:
    return s.Mul(s.Div(s.x, s.Add(s.Sqrt(s.mean(s.Pow(s.x, 2.0))), 1e-5)), GAIN)


def deviation_plus_epsilon(s: Speller) -> ir.Value:
    d = centered(s, s.x)
    return s.Add(s.Mul(s.Div(d, s.Add(s.Sqrt(s.mean(s.Mul(d, d))), 1e-6)), GAIN), BIAS)


def other_axis(s: Speller) -> ir.Value:
    return s.Mul(s.Div(s.x, s.Sqrt(s.Add(s.mean(s.Pow(s.x, 2.0), axis=1), 1e-5))), GAIN)


def two_axes(s: Speller) -> ir.Value:
    mean = s.ReduceMean(s.Pow(s.x, 2.0), np.array([-2, -1]))
    return s.Mul(s.Div(s.x, s.Sqrt(s.Add(mean, 1e-5))), GAIN)


def without_its_axis(s: Speller) -> ir.Value:
    return s.Mul(s.Div(s.x, s.Sqrt(s.Add(s.mean(s.Pow(s.x, 2.0), keepdims=0), 1e-5))), GAIN)


def another_numerator(s: Speller) -> ir.Value:
    return s.Mul(s.Div(s.Mul(s.x, s.x), root(s, s.x)), GAIN)


def fourth_root(s: Speller) -> ir.Value:
    return s.Mul(s.Div(s.x, s.Pow(s.Add(s.mean(s.Pow(s.x, 2.0)), 1e-5), 0.25)), GAIN)


def mean_of_magnitudes(s: Speller) -> ir.Value:
    return s.Mul(s.Div(s.x, s.Sqrt(s.Add(s.mean(s.Abs(s.x)), 1e-5))), GAIN)


def clipped(s: Speller) -> ir.Value:
    return s.Mul(s.Div(s.Min(s.x, 1e4), root(s, s.x)), GAIN)


def through_float16(s: Speller) -> ir.Value:
    return s.Mul(s.Div(s.x, s.cast(s.cast(root(s, s.x), F16), F32)), GAIN)


NEAR = {
    floor_under_the_length: "no RMSNormalization: with epsilon",
    length_without_epsilon: "no RMSNormalization: with epsilon",
    epsilon_outside: "no RMSNormalization: with epsilon",
    deviation_plus_epsilon: "no LayerNormalization: with epsilon",
    other_axis: "along the axes 1,",
    two_axes: "along the axes -2, -1,",
    without_its_axis: "cannot run it on its own|come out as",
    another_numerator: "does not depend|no RMSNormalization|NaN or infinite",
    fourth_root: "no RMSNormalization",
    mean_of_magnitudes: "no RMSNormalization",
    clipped: "no RMSNormalization",
    through_float16: "rounds to FLOAT16 inside",
}


@pytest.mark.parametrize("spell", NEAR, ids=lambda spell: spell.__name__)
def test_what_only_looks_like_a_norm_stays_and_says_why(spell: Callable[[Speller], ir.Value]) -> None:
    s = Speller()
    model = s.model(spell(s))
    before = [node.op_type for node in model.graph]
    report = lifted(model)
    assert [node.op_type for node in model.graph] == before
    assert not report.changes
    assert re.search(NEAR[spell], str(report.skips[0].reason))


def test_a_norm_whose_inside_is_read_stays_and_says_so() -> None:
    s = Speller()
    y = divided(s)
    deviation = next(node.outputs[0] for node in s.nodes if node.op_type == "Sqrt")
    deviation.shape = ir.Shape(["batch", "length", 1])
    report = lifted(s.model(y, deviation))
    assert [str(skip.reason).endswith(f"{deviation.name} inside it is read elsewhere") for skip in report.skips] == [
        True
    ]


def test_a_norm_in_float16_throughout_stays() -> None:
    s = Speller(F16)
    report = lifted(s.model(s.Mul(s.Div(s.x, root(s, s.x)), GAIN.astype(np.float16))))
    assert "sums numbers of FLOAT16" in str(report.skips[0].reason)


def test_a_gain_for_each_head_is_no_gain_of_a_norm() -> None:
    s = Speller(shape=("batch", "length", 4, N))
    gains = np.random.default_rng(1).uniform(0.5, 1.5, (4, N)).astype(np.float32)
    model = s.model(s.Mul(s.Div(s.x, root(s, s.x)), gains))
    lifted(model)
    # what is the same for all heads is a norm
    assert [node.op_type for node in model.graph] == ["RMSNormalization", "Mul"]
    assert (model.graph[0].inputs[1].const_value.numpy() == 1).all()


def test_norms_of_groups_are_norms_of_the_groups_only() -> None:
    s = Speller()
    groups = s.Reshape(s.x, np.array([0, 0, 4, N // 4]))
    groups.shape = ir.Shape(["batch", "length", 4, N // 4])
    normed = s.Div(groups, root(s, groups))
    y = s.Mul(s.Reshape(normed, np.array([0, 0, N])), GAIN)
    model = s.model(y)
    x = RANDOM.standard_normal((2, 3, N)).astype(np.float32)
    before = run(model, x)
    lifted(model)
    assert [node.op_type for node in model.graph] == ["Reshape", "RMSNormalization", "Reshape", "Mul"]
    assert len(model.graph[1].inputs[1].const_value.numpy()) == N // 4
    np.testing.assert_allclose(run(model, x), before, rtol=FLOAT32)


def test_less_than_the_mean_taken_away_stays_in_front_of_the_norm() -> None:
    s = Speller()
    d = s.Sub(s.x, s.Mul(s.mean(s.x), 0.5))
    model = s.model(s.Add(s.Mul(s.Div(d, root(s, d)), GAIN), BIAS))
    lifted(model)
    assert [node.op_type for node in model.graph] == ["ReduceMean", "Mul", "Sub", "RMSNormalization", "Add"]


def test_sums_that_divide_nothing_are_not_mentioned() -> None:
    s = Speller()
    model = s.model(s.Sub(s.x, s.mean(s.x)))
    report = lifted(model)
    assert (report.changes, report.skips) == ([], [])


def test_equal_structures_are_opened_once(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[ir.Model] = []
    by_runner = Runner.open_model

    def counting(self: Runner, model: ir.Model, *, rewritten: bool = True) -> Any:
        opened.append(model)
        return by_runner(self, model, rewritten=rewritten)

    monkeypatch.setattr(Runner, "open_model", counting)
    s, gains = Speller(), [np.random.default_rng(seed).uniform(0.5, 1.5, N).astype(np.float32) for seed in range(5)]
    x = s.x
    for gain in gains:
        x = s.Sigmoid(s.Mul(s.Div(x, root(s, x)), gain))
    model = s.model(x)
    lifted(model)
    assert [node.op_type for node in model.graph] == ["RMSNormalization", "Sigmoid"] * 5
    # one structure, in float64 and in float32
    assert len(opened) == 2


PARTS = st.fixed_dictionaries(
    {
        "centered": st.booleans(),
        "square": st.sampled_from(["Pow", "Mul", "ReduceSumSquare"]),
        "epsilon_first": st.booleans(),
        "division": st.sampled_from(["Div", "Reciprocal", "one over", "Pow"]),
        "gain": st.sampled_from(["x", "root", "end", "none"]),
        "one_plus": st.booleans(),
        "swapped": st.booleans(),
        "biased": st.booleans(),
        "casts": st.booleans(),
        "epsilon": st.sampled_from([1e-12, 1e-6, 1e-5, 1e-2]),
    }
)


@settings(max_examples=25)
@given(PARTS)
def test_any_order_of_the_parts_is_a_norm(how: dict[str, Any]) -> None:
    s = Speller()
    x = s.cast(s.x, F64) if how["casts"] else s.x
    d = s.Sub(x, s.mean(x)) if how["centered"] else x
    gain = s._value(GAIN, F32)
    if how["one_plus"]:
        gain = s.Add(s.Identity(s._value(GAIN - 1, F32), dtype=F32), 1.0)
    if how["casts"]:
        gain = s.cast(gain, F64)

    def times(a: ir.Value, b: ir.Value) -> ir.Value:
        return s.Mul(b, a) if how["swapped"] else s.Mul(a, b)

    if how["square"] == "ReduceSumSquare":
        mean = s.Div(s.ReduceSumSquare(d, np.array([-1])), float(N))
    else:
        mean = s.mean(s.Pow(d, 2.0) if how["square"] == "Pow" else s.Mul(d, d))
    epsilon = s._value(how["epsilon"], mean.dtype)
    epsilon.dtype = mean.dtype
    variance = s.Add(epsilon, mean, dtype=mean.dtype) if how["epsilon_first"] else s.Add(mean, epsilon)
    top = times(d, gain) if how["gain"] == "x" else d
    if how["division"] == "Div" and how["gain"] != "root":
        y = s.Div(top, s.Sqrt(variance))
    else:
        if how["division"] == "Pow":
            inverse = s.Pow(variance, -0.5)
        elif how["division"] == "Reciprocal":
            inverse = s.Reciprocal(s.Sqrt(variance))
        else:
            inverse = s.Div(s._value(np.ones(()), mean.dtype), s.Sqrt(variance), dtype=mean.dtype)
        y = times(top, times(inverse, gain) if how["gain"] == "root" else inverse)
    y = times(y, gain) if how["gain"] == "end" else y
    y = s.cast(y, F32) if how["casts"] else y
    biased = how["biased"] and how["centered"]
    y = s.Add(y, BIAS) if biased else y
    model = s.model(y)
    lifted(model)
    assert [node.op_type for node in model.graph] == ["LayerNormalization" if how["centered"] else "RMSNormalization"]
    node = model.graph[0]
    expected = np.ones(N) if how["gain"] == "none" else GAIN
    np.testing.assert_allclose(node.inputs[1].const_value.numpy(), expected, rtol=2.0**-22)
    assert node.attributes.get_float("epsilon") == pytest.approx(how["epsilon"], rel=1e-5)
    assert len(node.inputs) == 2 + biased
