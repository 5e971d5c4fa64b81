"""Scales that integer arithmetic can apply, in the int8 graph that onnxruntime makes of a file of convolutions.

HAWQ-V3 (arXiv:2011.10680): the factor from a sum of codes to the codes of the output, M = (scale of inputs) (scale of
weights) / (scale of outputs), is a whole number of few bits over a power of two. P2-ViT (arXiv:2405.19915): scales of
activations are powers of two. Both are real graphs here: scales are rounded to such numbers, and onnxruntime runs them;
its kernels still multiply floats by them, so no time is saved, and none is measured.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnxruntime
from onnx import numpy_helper

import graphopt
from graphopt.passes.recipe import Recipe

if TYPE_CHECKING:
    from collections.abc import Iterator

EXACT = ("canonicalize", "fold_constants", "fold_batch_norms")
LEVELS = 255


def session_of(model: Path | onnx.ModelProto, fused_to: Path | None = None) -> onnxruntime.InferenceSession:
    """Open a model with one thread; ``fused_to``: where to write onnxruntime's fused graph."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    if fused_to is not None:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        options.optimized_model_filepath = str(fused_to)
    content = str(model) if isinstance(model, Path) else model.SerializeToString()
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def recipe_of(**options: Any) -> Recipe:
    """Return the recipe that gives convolutions codes of fixed ranges."""
    convolutions = {"step": "quantize_convolutions", "activations": "static", **options}
    return Recipe.model_validate({"name": "convolutions", "steps": [*({"step": s} for s in EXACT), convolutions]})


def dyadic(model: onnx.ModelProto, bits: int) -> tuple[onnx.ModelProto, float]:
    """Return a graph whose multipliers are whole numbers of ``bits`` bits over powers of two, and how far one moved."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    tensors = {tensor.name: tensor for tensor in result.graph.initializer}
    largest = 0.0
    for number, node in enumerate(result.graph.node):
        if node.op_type != "QLinearConv":
            continue
        inputs, weights, outputs = (numpy_helper.to_array(tensors[node.input[n]]) for n in (1, 4, 6))
        multiplier = np.float64(inputs) * np.float64(weights) / np.float64(outputs)
        mantissa, exponent = np.frexp(multiplier)
        dyadic_multipliers = np.ldexp(np.rint(np.ldexp(mantissa, bits)), exponent - bits)
        largest = max(largest, float(np.abs(dyadic_multipliers / multiplier - 1).max()))
        scales = (dyadic_multipliers * outputs / inputs).astype(np.float32)
        result.graph.initializer.append(numpy_helper.from_array(scales, f"dyadic_{number}"))
        node.input[4] = f"dyadic_{number}"
    return result, largest


def cosine_and_error(reference: list[np.ndarray], outputs: list[np.ndarray]) -> tuple[float, float]:
    """Return the cosine and the relative error of outputs."""
    first, second = (
        np.concatenate([array.ravel() for array in arrays]).astype(float) for arrays in (reference, outputs)
    )
    length = np.linalg.norm(first)
    cosine = float(first @ second / length / np.linalg.norm(second))
    return cosine, float(np.linalg.norm(second - first) / length)


def rows(file: Path, calibration: Path, test_file: Path) -> Iterator[str]:
    """Yield a row for each kind of scale."""
    arrays = np.load(test_file)
    samples = [{name: arrays[name][n] for name in arrays.files} for n in range(len(arrays[arrays.files[0]]))]

    def outputs(session: onnxruntime.InferenceSession) -> list[np.ndarray]:
        return [np.asarray(session.run(None, sample)[0]) for sample in samples]

    reference = outputs(session_of(file))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        settings: dict[str, Any] = {"inputs": calibration, "quality_tokens": 0}
        graphopt.optimize(file, recipe_of(), folder / "int8", **settings)
        session_of(folder / "int8" / "model.onnx", folder / "int8" / "fused.onnx")
        fused_model = onnx.load(folder / "int8" / "fused.onnx")
        count = sum(node.op_type == "QLinearConv" for node in fused_model.graph.node)
        int8_outputs = outputs(session_of(fused_model))
        cosine, error = cosine_and_error(reference, int8_outputs)
        yield f"| int8 as it is, {count} QLinearConv | {cosine:.4f} | {error:.4f} | |"
        for bits in (16, 8, 4):
            model, largest_move = dyadic(fused_model, bits)
            new_outputs = outputs(session_of(model))
            cosine, error = cosine_and_error(reference, new_outputs)
            change = cosine_and_error(int8_outputs, new_outputs)[1]
            kind = f"HAWQ-V3: multipliers of {bits} bits, moved by {largest_move:.1e}"
            yield f"| {kind} | {cosine:.4f} | {error:.4f} | {change:.1e} |"
        recipe: Any = graphopt.read(folder / "int8").manifest.recipe
        known_ranges = next(step["known_ranges"] for step in recipe["steps"] if step["step"] == "quantize_convolutions")
        for name, (low, high) in known_ranges["ranges"].items():
            step = (high - low) / LEVELS
            if step > 0:
                factor = 2.0 ** np.ceil(np.log2(step)) / step
                known_ranges["ranges"][name] = (low * factor, high * factor)
        graphopt.optimize(file, recipe_of(known_ranges=known_ranges), folder / "powers", **settings)
        new_outputs = outputs(session_of(folder / "powers" / "model.onnx"))
        cosine, error = cosine_and_error(reference, new_outputs)
        change = cosine_and_error(int8_outputs, new_outputs)[1]
        yield f"| P2-ViT: steps of activations are powers of two | {cosine:.4f} | {error:.4f} | {change:.1e} |"
