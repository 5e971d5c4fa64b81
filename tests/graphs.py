"""Small graphs with a residual stream, built by hand: what a rewrite must keep, without an export. And how tests run
passes and models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime

from graphopt.artifact import artifact
from graphopt.compile.compilation import Compilation
from graphopt.graph.diagnostics import PassReport
from graphopt.ort.session import open_session
from graphopt.passes import PASSES
from graphopt.passes.base import Pass
from graphopt.passes.recipe import Recipe
from graphopt.tasks.causal_lm.interface import Interface

VOCABULARY = 24


@dataclass
class Builder:
    """Adds nodes and weights to a graph, with shapes, under readable names."""

    random: np.random.Generator
    nodes: list[ir.Node]
    weights: list[ir.Value]

    def weight(self, name: str, *shape: int) -> ir.Value:
        array = self.random.standard_normal(shape).astype(np.float32) / np.float32(np.sqrt(shape[0]))
        return self.constant(name, array)

    def constant(self, name: str, array: np.ndarray) -> ir.Value:
        value = ir.val(name, const_value=ir.tensor(array, name=name))
        self.weights.append(value)
        return value

    def op(
        self, op_type: str, inputs: list[ir.Value | None], width: int | None, name: str, **attributes: object
    ) -> ir.Value:
        node = ir.node(op_type, inputs, attributes or None, name=name)  # type: ignore[arg-type]
        output = node.outputs[0]
        output.name, output.dtype = f"{name}.out", ir.DataType.FLOAT
        output.shape = ir.Shape(["batch", "length"] if width is None else ["batch", "length", width])
        self.nodes.append(node)
        return output


def graph_of(build: Builder, inputs: list[ir.Value], outputs: list[ir.Value]) -> ir.Model:
    """Return a model of opset 23 of what was built."""
    graph = ir.Graph(inputs, outputs, nodes=build.nodes, initializers=build.weights, opset_imports={"": 23}, name="g")
    return ir.Model(graph, ir_version=10)


def residual_model(
    width: int = 16,
    inner: int = 12,
    layers: int = 2,
    *,
    seed: int = 0,
    biases: bool = False,
    gains: bool = True,
    tied: bool = False,
    multiplier: float | None = None,
    post_norm: bool = False,
    residual_output: bool = False,
    layer_norm: bool = False,
) -> ir.Model:
    """Return logits = head(norm(x)), x = table[ids] + sum of layers w2(sigmoid(w1(norm(x)))), by the options given.

    Args:
        biases: writers and readers have biases.
        gains: norms have random gains; ones otherwise.
        tied: the head is the transposed table.
        multiplier: a number that scales the embedding.
        post_norm: what a layer adds passes a norm with a gain first, as in Gemma2.
        residual_output: the residual stream is an output of the graph.
        layer_norm: norms are LayerNormalizations with biases.
    """
    build = Builder(np.random.default_rng(seed), [], [])
    ids = ir.val("input_ids", ir.DataType.INT64, ["batch", "length"])
    table = build.weight("table", VOCABULARY, width)
    x = build.op("Gather", [table, ids], width, "embedding", axis=0)
    if multiplier is not None:
        x = build.op("Mul", [x, build.constant("multiplier", np.array(multiplier, np.float32))], width, "scaled")

    def norm(value: ir.Value, name: str) -> ir.Value:
        gain = build.random.uniform(0.5, 1.5, width) if gains else np.ones(width)
        inputs: list[ir.Value | None] = [value, build.constant(f"{name}.gain", gain.astype(np.float32))]
        if layer_norm:
            inputs.append(build.weight(f"{name}.bias", width))
        return build.op("LayerNormalization" if layer_norm else "RMSNormalization", inputs, width, name, axis=-1)

    def linear(value: ir.Value, columns: int, name: str) -> ir.Value:
        assert value.shape is not None
        rows = value.shape[2]
        assert isinstance(rows, int)
        value = build.op("MatMul", [value, build.weight(f"{name}.weight", rows, columns)], columns, name)
        if biases:
            value = build.op("Add", [value, build.weight(f"{name}.bias", columns)], columns, f"{name}.add_bias")
        return value

    for layer in range(layers):
        hidden = linear(norm(x, f"norm{layer}"), inner, f"up{layer}")
        branch = linear(build.op("Sigmoid", [hidden], inner, f"sigmoid{layer}"), width, f"down{layer}")
        if post_norm:
            branch = norm(branch, f"post_norm{layer}")
        x = build.op("Add", [x, branch], width, f"residual{layer}")
    final = norm(x, "final_norm")
    if tied:
        transpose = ir.node("Transpose", [table], {"perm": [1, 0]}, name="transposed_table")
        transpose.outputs[0].name, transpose.outputs[0].dtype = "transposed", ir.DataType.FLOAT
        transpose.outputs[0].shape = ir.Shape([width, VOCABULARY])
        build.nodes.append(transpose)
        logits = build.op("MatMul", [final, transpose.outputs[0]], VOCABULARY, "head")
    else:
        logits = linear(final, VOCABULARY, "head")
    logits.name = "logits"
    outputs = [logits, x] if residual_output else [logits]
    graph = ir.Graph(
        [ids], outputs, nodes=build.nodes, initializers=build.weights, opset_imports={"": 23}, name="small"
    )
    return ir.Model(graph, ir_version=10)


def run_pass(model: ir.Model, name: str, **options: Any) -> PassReport:
    """Run one pass on ``model``, in place, and return its report."""
    step = PASSES[name]
    report: PassReport = step(**options)(model).report
    return report


def canonical(folder: Path) -> ir.Model:
    """Read the graph of an artifact, canonicalized."""
    model = artifact.read(folder).model
    run_pass(model, "canonicalize")
    return model


def save(model: ir.Model, folder: Path, name: str = "model.onnx") -> Path:
    """Write ``model`` with external data beside it."""
    path = folder / name
    ir.save(model, path, external_data=f"{name}.data", size_threshold_bytes=64)
    return path


def session(model: ir.Model, folder: Path) -> onnxruntime.InferenceSession:
    """Open ``model`` in onnxruntime."""
    folder.mkdir(parents=True, exist_ok=True)
    return open_session(save(model, folder))


def logits(model: ir.Model, folder: Path, seed: int = 1) -> np.ndarray:
    """Run ``model`` on random tokens, float32 [3, 5, vocabulary]."""
    ids = np.random.default_rng(seed).integers(0, VOCABULARY, (3, 5))
    return session(model, folder).run(["logits"], {"input_ids": ids})[0]


def logits_of(model: ir.Model, ids: np.ndarray, folder: Path) -> np.ndarray:
    """Run a language model on sequences [batch, length] without a past; return [batch, length, vocabulary]."""
    model_session = session(model, folder)
    interface = Interface.of_session(model_session)
    feeds = interface.feeds(ids, np.ones_like(ids), interface.empty_past(len(ids), ids.shape[1]))
    return np.asarray(model_session.run(["logits"], feeds)[0])


def relative(before: np.ndarray, after: np.ndarray) -> float:
    """Return the largest difference, relative to the largest value before."""
    return float(np.abs(after - before).max() / np.abs(before).max())


def compile_artifact(source: artifact.Artifact, recipe: Recipe, folder: Path) -> tuple[ir.Model, list[PassReport]]:
    """Run all steps of a recipe that needs no text, as `optimize` does, but check nothing and run nothing.

    Args:
        source: what to make it of.
        recipe: as it is written; steps that the graph needs are added.
        folder: an empty one, for evaluated weights.
    """
    compilation = Compilation(source, recipe, work=folder)

    def settle(step: Pass) -> None:
        if step.phase() == "lower":  # it reads scales
            compilation.settle()

    compilation.apply_unchecked(compilation.passes, settle)
    return compilation.model, compilation.reports
