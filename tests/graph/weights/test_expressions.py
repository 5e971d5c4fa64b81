from __future__ import annotations

import dataclasses
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphopt.graph.weights import (
    Array,
    Cast,
    Exponential,
    Expression,
    Inline,
    Rotate,
    Scale,
    Slice,
    StoredBytes,
    VectorTimes,
    blocks_of,
    expression_of,
    nodes_below,
)
from graphopt.numerics.formats import FORMATS
from graphopt.numerics.rotations import RandomRotation
from graphopt.passes.common.table_layout import PackCodes, TileScales
from graphopt.quantization.rounding.expressions import MatrixRounding, parts_of
from tests.graph.weights.expressions import expressions


@given(pair=expressions())
@settings(max_examples=100, deadline=None)
def test_an_expression_is_what_numpy_says_it_is(pair: tuple[Expression, Array]) -> None:
    expression, expected = pair
    assert expression.shape == expected.shape
    # a mean of six numbers may be summed in another order
    assert np.allclose(expression.numpy(), expected, rtol=1e-12, atol=1e-12)


@given(pair=expressions(), data=st.data())
@settings(max_examples=100, deadline=None)
def test_numbers_have_the_same_bits_in_any_region(pair: tuple[Expression, Array], data: st.DataObject) -> None:
    expression, _ = pair
    region = []
    for size in expression.shape:
        start = data.draw(st.integers(0, size))
        region.append(slice(start, data.draw(st.integers(start, size))))
    assert np.array_equal(expression.evaluate(tuple(region)), expression.numpy()[tuple(region)])


def test_an_exponential_is_rounded_once() -> None:
    numbers = np.linspace(-5, 5, 37, dtype=np.float32)
    expression = Exponential(Inline.from_array(numbers), -1.0)
    assert np.array_equal(expression.numpy(), (-np.exp(numbers.astype(np.float64))).astype(np.float32))
    assert np.array_equal(expression.evaluate((slice(5, 6),)), expression.numpy()[5:6])
    assert pickle.loads(pickle.dumps(expression)).digest == expression.digest


@given(pair=expressions())
@settings(max_examples=50, deadline=None)
def test_pickling_changes_nothing(pair: tuple[Expression, Array]) -> None:
    expression, _ = pair
    copy = pickle.loads(pickle.dumps(expression))
    assert (copy.digest, str(copy)) == (expression.digest, str(expression))
    assert np.array_equal(copy.numpy(), expression.numpy())


@given(first=expressions(2), second=expressions(2))
@settings(max_examples=100, deadline=None)
def test_digests_are_equal_where_expressions_are_equal(
    first: tuple[Expression, Array], second: tuple[Expression, Array]
) -> None:
    def content(expression: Expression) -> object:
        leaves = [node.array.tobytes() for node in nodes_below(expression) if isinstance(node, Inline)]
        return str(expression), leaves

    assert (first[0].digest == second[0].digest) == (content(first[0]) == content(second[0]))


@pytest.mark.parametrize("dtype", [ir.DataType.FLOAT, ir.DataType.BFLOAT16, ir.DataType.INT4, ir.DataType.INT64])
def test_stored_bytes_have_the_digest_of_their_array(dtype: ir.DataType, tmp_path: Path) -> None:
    array = np.arange(-4, 4).reshape(2, 4).astype(dtype.numpy())
    (tmp_path / "data").write_bytes(b"xx" + ir.Tensor(array, dtype=dtype).tobytes())
    stored_bytes = StoredBytes(str(tmp_path / "data"), 2, dtype, (2, 4))
    assert np.array_equal(stored_bytes.numpy(), array)
    assert stored_bytes.digest == Inline(array, dtype).digest
    assert stored_bytes.digest != dataclasses.replace(stored_bytes, offset=1, dims=(8,)).digest
    assert expression_of(stored_bytes.tensor("w")) is stored_bytes
    assert "data, 2" in str(stored_bytes)


def test_any_field_that_changes_changes_the_digest() -> None:
    matrix = Inline.from_array(np.arange(8.0).reshape(4, 2))
    rounding = MatrixRounding(matrix, FORMATS["int4"], 2, "extreme")
    changes: list[dict[str, object]] = [
        {"format": FORMATS["int8"]},
        {"group": 4},
        {"scale": "least_squares"},
        {"axis": 1},
        {"half": True},
        {"standard": False},
        {"source": Inline.from_array(np.arange(1.0, 9.0).reshape(4, 2))},
    ]
    digests = [rounding.digest, *(dataclasses.replace(rounding, **change).digest for change in changes)]
    assert len(set(digests)) == len(digests)
    assert len({part.digest for part in parts_of(rounding).values()}) == 2


def test_a_cast_that_saturates_keeps_infinity() -> None:
    numbers = Inline.from_array(np.array([1e6, -1e6, np.inf, 1.5], np.float32))
    assert Cast(numbers, ir.DataType.FLOAT16, saturate=True).numpy().tolist() == [65504, -65504, np.inf, 1.5]


def test_a_dense_rotation_has_the_same_bits_whatever_part_is_read() -> None:
    matrix = Inline.from_array(np.random.default_rng(0).standard_normal((300, 48)))
    rotation = Rotate(matrix, 1, (0,), RandomRotation(48, 3).claim())
    assert np.array_equal(Slice.cut(rotation, {0: slice(7, 8)}).numpy(), rotation.numpy()[7:8])
    assert np.allclose(rotation.numpy(), matrix.array @ RandomRotation(48, 3).matrix)


def test_a_vector_times_a_matrix() -> None:
    random = np.random.default_rng(0)
    vector, matrix = random.standard_normal(5), random.standard_normal((5, 7))
    product = VectorTimes(Inline.from_array(vector), Inline.from_array(matrix))
    assert np.allclose(product.numpy(), vector @ matrix)
    assert np.array_equal(Slice.cut(product, {0: slice(2, 4)}).numpy(), product.numpy()[2:4])


def test_an_expression_is_printed_as_it_is_made() -> None:
    weight = Scale(Inline.from_array(np.ones((2, 3))), Inline.from_array(np.ones(2)), 0)
    text = str(Cast(weight, ir.DataType.FLOAT))
    assert (
        text
        == "cast(scale(inline(array=float64[2, 3], kind=double), inline(array=float64[2], kind=double), axis=0), target=float, saturate=False)"  # noqa: E501
    )


def test_what_does_not_keep_its_promise_is_caught() -> None:
    @dataclasses.dataclass(frozen=True, eq=False)
    class Wrong(Scale):
        def evaluate(self, region: tuple[slice, ...]) -> Array:
            return np.zeros((2, 3))

    with pytest.raises(ValueError, match=r"came out as \(2, 3\), promised as \(3, 2\)"):
        Wrong(Inline.from_array(np.ones((3, 2))), Inline.from_array(np.ones(3)), 0).numpy()


def test_packed_codes_need_no_rounding_of_their_own() -> None:
    weight = Inline.from_array(np.random.default_rng(0).standard_normal((32, 16)).astype(np.float32))
    parts = parts_of(MatrixRounding(weight, FORMATS["nf4"], 16, "extreme", standard=False))
    packs = (PackCodes(parts["codes"], FORMATS["nf4"].bits), TileScales(parts["scales"], ir.DataType.FLOAT))
    roundings = {node for expression in packs for node in nodes_below(expression) if isinstance(node, MatrixRounding)}
    assert len(roundings) == 1


def test_a_large_tensor_is_evaluated_in_blocks() -> None:
    assert [[block[0].stop - block[0].start for block in blocks_of((5000, 512), 1)]] == [[2048, 2048, 904]]


def test_threads_read_one_tensor_side_by_side(tmp_path: Path) -> None:
    numbers = np.arange(4096, dtype=np.float32)
    (tmp_path / "numbers.bin").write_bytes(numbers.tobytes())
    tensor = StoredBytes(str(tmp_path / "numbers.bin"), 0, ir.DataType.FLOAT, (4096,)).tensor()
    with ThreadPoolExecutor(4) as threads:
        arrays = list(threads.map(lambda _: tensor.numpy(), range(400)))
        contents = list(threads.map(lambda _: tensor.tobytes(), range(400)))
    assert all(np.array_equal(array, numbers) for array in arrays)
    assert all(content == numbers.tobytes() for content in contents)


def test_a_tensor_of_no_numbers_has_no_bytes_where_others_lie(tmp_path: Path) -> None:
    """Placeholders of states are such tensors, and ``verify`` reads the bytes of all."""
    (tmp_path / "data").write_bytes(b"others")
    tensor = StoredBytes(str(tmp_path / "data"), 0, ir.DataType.FLOAT16, (0,)).tensor()
    assert (tensor.tobytes(), tensor.numpy().shape) == (b"", (0,))
