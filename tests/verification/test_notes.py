"""What is said of a graph that no figure says."""

from __future__ import annotations

import onnx.parser
import onnx_ir as ir

from graphopt.analysis.structure.cost import storage_formats, weight_totals
from graphopt.passes.recipe import load_recipe
from graphopt.verification.notes import precision_of


def test_a_file_that_was_quantized_before_is_not_called_float() -> None:
    model = ir.from_proto(
        onnx.parser.parse_model(
            """<ir_version: 10, opset_import: ["": 23]>
            g (float[n, 4] x) => (float[n, 8] y) <
                uint8[4, 8] w = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15,
                                 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31},
                float[8] bias = {0, 0, 0, 0, 0, 0, 0, 0}
            > {
                codes, scale, zero = DynamicQuantizeLinear(x)
                sums = MatMulInteger(codes, w, zero)
                numbers = Cast<to = 1>(sums)
                product = Mul(numbers, scale)
                y = Add(product, bias)
            }"""
        )
    )
    precision = precision_of(model, None, load_recipe("int8"))
    assert [str(note) for note in precision.notes] == [
        "1 product(s) of integers were in the file before (MatMulInteger): they stay as they are",
        "what is not said here is computed in float32",
    ]
    assert storage_formats(model) == {"uint8": 1, "float32": 1}
    assert (weight_totals(model).parameters, weight_totals(model).bytes) == (40, 64)
