from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphopt.errors import InputError
from graphopt.weights import blocks_of, check_finite, lazy, new_weight, own, rewrite, weight_of
from tests.graphs import residual_model


def node_of(model: ir.Model, name: str) -> ir.Node:
    return next(node for node in model.graph if node.name == name)


def test_owning_a_shared_weight_leaves_the_other_user_alone() -> None:
    model = residual_model()
    one, two = node_of(model, "up0"), node_of(model, "up1")
    two.replace_input_with(1, one.inputs[1])
    mine = own(one, 1)
    rewrite(mine, lambda w: 2 * w)
    theirs = weight_of(two, 1)
    assert theirs is not None
    assert theirs is not mine
    assert np.array_equal(mine.const_value.numpy(), 2 * theirs.const_value.numpy())
    assert own(one, 1) is mine  # a second time there is nothing to copy


def test_a_rewrite_is_computed_when_it_is_read_and_not_before() -> None:
    model, calls = residual_model(), []
    weight = own(node_of(model, "up0"), 1)
    before = weight.const_value.numpy().copy()

    def double(array: np.ndarray) -> np.ndarray:
        calls.append(array.dtype)
        return 2 * array

    rewrite(weight, double)
    assert not calls
    assert weight.const_value.shape == before.shape
    assert np.array_equal(weight.const_value.numpy(), 2 * before)
    # evaluated in float64, stored in its own dtype
    assert calls == [np.float64]
    assert weight.const_value.numpy().dtype == np.float32


def test_a_function_that_breaks_its_promise_about_the_shape_is_caught() -> None:
    broken = lazy(lambda: np.zeros((2, 3)), ir.DataType.FLOAT, (3, 2), "w")
    with pytest.raises(ValueError, match=r"w came out as \(2, 3\), promised as \(3, 2\)"):
        broken.numpy()


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


@given(shape=st.lists(st.integers(1, 5000), min_size=1, max_size=2).map(tuple), axis=st.integers(0, 1))
@settings(max_examples=30)
def test_blocks_cover_every_number_once_and_keep_the_axis_whole(shape: tuple[int, ...], axis: int) -> None:
    axis = min(axis, len(shape) - 1)
    seen = np.zeros(shape, np.int8)
    for block in blocks_of(shape, axis):
        assert seen[block].shape[axis] == shape[axis]
        seen[block] += 1
    assert (seen == 1).all()


def test_a_large_weight_is_rewritten_in_blocks() -> None:
    model, widths = residual_model(), []
    node = node_of(model, "up0")
    large = np.random.default_rng(0).standard_normal((512, 9000)).astype(np.float32)
    node.inputs[1].const_value = ir.tensor(large, name="up0.weight")

    def double(array: np.ndarray) -> np.ndarray:
        widths.append(array.shape[1])
        return 2 * array

    rewrite(own(node, 1), double)
    assert np.array_equal(node.inputs[1].const_value.numpy(), 2 * large)
    # 2^20 numbers a block: 2048 columns of 512
    assert widths == [2048, 2048, 2048, 2048, 808]
