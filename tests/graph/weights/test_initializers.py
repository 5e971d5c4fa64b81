from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphopt.errors import InputError
from graphopt.graph.weights import (
    Array,
    Expression,
    Inline,
    Region,
    Reshape,
    Scale,
    WeightTensor,
    blocks_of,
    check_finite,
    new_weight,
    own_input,
    rewrite,
    weight_of,
)
from tests.graphs import residual_model


@dataclasses.dataclass(frozen=True, eq=False)
class WatchedExpression(Expression):
    """As ``source``; remembers type and shape of each block that is evaluated."""

    source: Expression
    calls: ClassVar[list[tuple[np.dtype, tuple[int, ...]]]] = []

    @property
    def dtype(self) -> ir.DataType:
        return self.source.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    @property
    def whole(self) -> frozenset[int]:
        return frozenset({0})

    def evaluate(self, region: Region) -> Array:
        array = self.source.evaluate(region)
        self.calls.append((array.dtype, array.shape))
        return array


def double(weight: Expression) -> Expression:
    return Scale(weight, Inline.from_array(np.full(weight.shape[0], 2.0)), 0)


def node_of(model: ir.Model, name: str) -> ir.Node:
    return next(node for node in model.graph if node.name == name)


def test_owning_a_shared_weight_leaves_the_other_user_alone() -> None:
    model = residual_model()
    first_node, second_node = node_of(model, "up0"), node_of(model, "up1")
    second_node.replace_input_with(1, first_node.inputs[1])
    own_weight = own_input(first_node, 1)
    rewrite(own_weight, double)
    other_weight = weight_of(second_node, 1)
    assert other_weight is not None
    assert other_weight is not own_weight
    assert np.array_equal(own_weight.const_value.numpy(), 2 * other_weight.const_value.numpy())
    assert own_input(first_node, 1) is own_weight  # a second time there is nothing to copy


def test_a_rewrite_is_computed_when_it_is_read_and_not_before() -> None:
    model = residual_model()
    weight = own_input(node_of(model, "up0"), 1)
    before = weight.const_value.numpy().copy()
    WatchedExpression.calls.clear()
    rewrite(weight, double, WatchedExpression)
    assert not WatchedExpression.calls
    assert weight.const_value.shape == before.shape
    assert np.array_equal(weight.const_value.numpy(), 2 * before)
    # evaluated in float64, stored in its own dtype
    assert WatchedExpression.calls == [(np.dtype(np.float64), before.shape)]
    assert weight.const_value.numpy().dtype == np.float32


def test_a_rewrite_to_another_shape_is_refused() -> None:
    weight = own_input(node_of(residual_model(), "up0"), 1)
    with pytest.raises(ValueError, match=r"up0.weight came out as \(192,\), promised as \(16, 12\)"):
        rewrite(weight, lambda expression: Reshape.to_dims(expression, [-1]))


def test_new_names_never_take_an_old_one() -> None:
    model = residual_model()
    tensor = ir.tensor([1.0])
    names = [new_weight(model.graph, "table", tensor).name for _ in range(3)]
    assert names == ["table.1", "table.2", "table.3"]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_weight_that_is_not_finite_is_named_with_its_place(bad: float, dtype: type) -> None:
    model = residual_model()
    array = np.zeros((16, 12), dtype)
    array[3, 4] = bad
    model.graph.initializers["up0.weight"].const_value = ir.tensor(array, name="up0.weight")
    with pytest.raises(InputError, match=r"1 value\(s\).*index \[3, 4\].*tensor=up0.weight.*shape=\[16, 12\]"):
        check_finite(model)


def test_a_computed_weight_that_is_not_finite_is_named_with_its_place_in_the_whole() -> None:
    model = residual_model()
    array = np.zeros((3, 1 << 20), np.float32)
    array[[1, 2, 2], [9, 4, 5]] = np.inf
    WatchedExpression.calls.clear()
    model.graph.initializers["up0.weight"].const_value = WeightTensor(
        WatchedExpression(Inline.from_array(array)), "up0.weight"
    )
    with pytest.raises(InputError, match=r"3 value\(s\).*index \[1, 9\].*tensor=up0.weight"):
        check_finite(model)
    # blocks of 2^20 numbers, so that no large weight is in memory as a whole
    assert all(math.prod(shape) <= 1 << 20 for _, shape in WatchedExpression.calls)
    assert len(WatchedExpression.calls) > 2


@given(shape=st.lists(st.integers(1, 5000), min_size=1, max_size=2).map(tuple), axis=st.integers(0, 1))
@settings(max_examples=30)
def test_blocks_cover_every_number_once_and_keep_the_axis_whole(shape: tuple[int, ...], axis: int) -> None:
    axis = min(axis, len(shape) - 1)
    counts = np.zeros(shape, np.int8)
    for block in blocks_of(shape, axis):
        assert counts[block].shape[axis] == shape[axis]
        counts[block] += 1
    assert (counts == 1).all()


def test_a_large_weight_is_rewritten_in_blocks() -> None:
    model = residual_model()
    node = node_of(model, "up0")
    large = np.random.default_rng(0).standard_normal((512, 9000)).astype(np.float32)
    node.inputs[1].const_value = ir.tensor(large, name="up0.weight")
    WatchedExpression.calls.clear()
    rewrite(own_input(node, 1), double, WatchedExpression)
    assert np.array_equal(node.inputs[1].const_value.numpy(), 2 * large)
    # 2^20 numbers a block: 2048 columns of 512
    assert [shape[1] for _, shape in WatchedExpression.calls] == [2048, 2048, 2048, 2048, 808]
