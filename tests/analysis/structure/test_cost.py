from __future__ import annotations

import pytest

from graphopt.analysis.structure.cost import storage_formats, weight_totals
from graphopt.passes.codes.quantize_weights import EmbeddingFormat, LinearFormat, QuantizeWeights
from tests.graphs import VOCABULARY, residual_model, run_pass

WIDTH, INNER, LAYERS = 32, 48, 2
MATRICES = LAYERS * 2 * WIDTH * INNER
PARAMETERS = VOCABULARY * WIDTH + MATRICES + WIDTH * VOCABULARY + (2 + 1) * WIDTH


def test_a_float_model_has_32_bits_a_weight() -> None:
    totals = weight_totals(residual_model(WIDTH, INNER, LAYERS))
    assert totals.parameters == PARAMETERS
    assert totals.bytes == 4 * PARAMETERS
    assert totals.bits_per_weight == 32


@pytest.mark.parametrize(("linear", "bits"), [("int4", 4), ("uint4", 4), ("int8", 8)])
def test_scales_and_zero_points_add_bytes_and_no_parameters(linear: str, bits: int) -> None:
    model = residual_model(WIDTH, INNER, LAYERS)
    options = QuantizeWeights(
        linear=LinearFormat(format=linear, group=16),  # type: ignore[arg-type]
        lm_head=LinearFormat(format="int8", group=32),
        embedding=EmbeddingFormat(group=16),
    )
    options(model)
    totals = weight_totals(model)
    assert totals.parameters == PARAMETERS
    zero_points = bits if linear.startswith("u") else 0
    expected = MATRICES * (bits + (32 + zero_points) / 16)
    expected += VOCABULARY * WIDTH * ((8 + 32 / 16) + (8 + 32 / 32)) + 3 * WIDTH * 32
    assert 8 * totals.bytes == expected
    assert totals.bits_per_weight == pytest.approx(expected / PARAMETERS)
    expected_formats = {"float32": 3, "int8": 2 + (4 if linear == "int8" else 0)}
    assert storage_formats(model) == expected_formats | ({} if linear == "int8" else {linear: 4})


@pytest.mark.parametrize(("name", "bits"), [("fp6-e2m3", 6), ("nf4", 4), ("uint3", 3)])
def test_packed_codes_count_as_the_numbers_they_stand_for(name: str, bits: int) -> None:
    model = residual_model(WIDTH, INNER, LAYERS)
    linear = LinearFormat(format=name, group=16)
    QuantizeWeights(linear=linear, lm_head=linear, embedding=None)(model)
    run_pass(model, "lower")
    totals = weight_totals(model)
    assert totals.parameters == PARAMETERS
    # 24 columns of the head are padded to 32; a table is stored once, and what is neutral takes two bytes
    zero_points = 16 if name.startswith("u") else 0
    padded_size = MATRICES + WIDTH * 32
    expected = padded_size * (bits + (16 + zero_points) / 16) + 32 * 2**bits + (0 if zero_points else 16)
    expected += (VOCABULARY + 3) * WIDTH * 32
    assert 8 * totals.bytes == expected
    assert storage_formats(model) == {"float32": 4, name: 5}


def test_a_table_of_ones_own_tells_its_size() -> None:
    model = residual_model(WIDTH, INNER, LAYERS)
    QuantizeWeights(linear=LinearFormat(format=(-1.0, 0.0, 0.5), group=16), lm_head=None)(model)
    run_pass(model, "lower")
    assert storage_formats(model)["a table of 3 values"] == 4
