"""Measure the loss of a model whose feed-forward layers keep only the neurons that a prompt used most.

    python tools/studies/chosen_neurons.py float32                    # an artifact in float32; minutes on two cores
    python tools/studies/chosen_neurons.py float32 --share 0.5 --prompt 512 --text 256 --windows 8

GRIFFIN (Dong et al., 2024, section 4): of the activations of each layer over a prompt, each token scaled to length 1,
neurons are ranked by their norm over the tokens; the text after the prompt uses the first of them alone.
Printed are the divergence from the whole model on the text after the prompt, how often the first choice is the same,
and the share of all weights that a step reads, which bounds its speed. A draft by the model itself would cost that
share of a step for each guess.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import typer
from rich.console import Console
from rich.table import Table

# Run as a script, Python looks for modules in tools/ only.
sys.path.insert(0, str(Path(__file__).parents[2]))
from graphopt.errors import InputError
from graphopt.inference.session import load
from graphopt.ort.session import open_session
from graphopt.quality.figures import log_probabilities
from graphopt.quality.texts import held_out_texts
from graphopt.tasks import task_of
from tools.bench.parts.options import JsonFile

Floats = npt.NDArray[np.float32]


def down_products(model: ir.Model) -> list[ir.Node]:
    """Return the products that end the feed-forward layers: they read an elementwise function of wider states.

    Raises:
        InputError: there is none.
    """
    products = []
    for node in model.graph:
        weight = node.inputs[1].const_value if node.op_type == "MatMul" and node.inputs[1] is not None else None
        shape = () if weight is None else weight.shape.numpy()
        if len(shape) != 2 or shape[0] <= shape[1]:
            continue
        producer = node.inputs[0].producer() if node.inputs[0] is not None else None
        if producer is not None and producer.op_type in ("Mul", "Gelu", "Relu", "FastGelu"):
            products.append(node)
    if not products:
        raise InputError("no feed-forward layer is found", remedy="give an artifact in float32, as export writes it")
    return products


def weight_of(product: ir.Node) -> ir.TensorProtocol:
    """Return the matrix of a product that :func:`down_products` found."""
    value = product.inputs[1]
    assert value is not None
    assert value.const_value is not None
    return value.const_value


def add_masks(model: ir.Model, products: list[ir.Node]) -> None:
    """Multiply the input of each product, now the output ``neurons.N``, by an input ``mask.N`` [length, neurons]."""
    for number, node in enumerate(products):
        state = node.inputs[0]
        assert state is not None
        shape = ir.Shape(["length", weight_of(node).shape.numpy()[0]])
        mask = ir.Value(name=f"mask.{number}", type=ir.TensorType(ir.DataType.FLOAT), shape=shape)
        model.graph.inputs.append(mask)
        product = ir.node("Mul", [state, mask], name=f"masked.{number}")
        product.outputs[0].name = f"masked.{number}"
        node.replace_input_with(0, product.outputs[0])
        model.graph.insert_before(node, product)
        state.name = f"neurons.{number}"
        model.graph.outputs.append(state)


def rank_neurons(activations: Floats) -> npt.NDArray[np.int64]:
    """Return neurons in the order of their use: equation 5 of the paper; activations [tokens, neurons]."""
    directions = activations / np.maximum(np.linalg.norm(activations, axis=1, keepdims=True), 1e-12)
    return np.argsort(-np.linalg.norm(directions, axis=0), kind="stable")


def main(
    folder: Annotated[Path, typer.Argument(help="an artifact in float32 with a tokenizer")],
    share: Annotated[list[float], typer.Option(help="of neurons that are kept")] = [0.25, 0.5, 0.75],  # noqa: B006
    prompt: Annotated[int, typer.Option(help="tokens by which neurons are chosen")] = 512,
    text: Annotated[int, typer.Option(help="tokens after them that are scored")] = 256,
    windows: Annotated[int, typer.Option(help="of each held-out text")] = 4,
    json_file: JsonFile = None,
) -> None:
    """Print a row for each share and text."""
    tokenizer = load(folder).require_tokenizer()
    file = folder / "model.onnx"
    model = ir.load(file)
    task, products = task_of(model.graph), down_products(model)
    weights = [weight_of(node) for node in products]
    widths = [weight.shape.numpy()[0] for weight in weights]
    weight_count = sum(
        value.const_value.size for value in model.graph.initializers.values() if value.const_value is not None
    )
    # All products of a feed-forward layer are as large as the one that ends it, and shrink alike.
    has_gate = any(node.op_type == "Mul" for node in (products[0].predecessors()))
    inner = (3 if has_gate else 2) * sum(weight.size for weight in weights)
    length = prompt + text
    rows = []
    samples: list[tuple[str, dict[str, npt.NDArray[np.generic]]]] = []
    for name, content in zip(("English", "source code"), held_out_texts(), strict=True):
        ids = tokenizer.encode(content[: 8 * windows * length], add_special_tokens=False).ids
        for begin in range(0, min(windows * length, len(ids) - length + 1), length):
            samples.append(
                (name, dict(task.text_feeds(model.graph, np.array([ids[begin : begin + length]], np.int64))))
            )
    add_masks(model, products)
    outputs = [task.output, *(f"neurons.{number}" for number in range(len(products)))]
    session = open_session(file, content=ir.to_proto(model).SerializeToString())
    results: dict[tuple[str, float], list[Floats]] = {}
    for name, feeds in samples:
        full_masks = {f"mask.{number}": np.ones((length, width), np.float32) for number, width in enumerate(widths)}
        logits, *activations = session.run(outputs, {**feeds, **full_masks})
        full_logs = log_probabilities(logits[0, prompt:])
        orders = [rank_neurons(states.reshape(length, -1)[:prompt]) for states in activations]
        for kept_share in share:
            masks = {key: mask.copy() for key, mask in full_masks.items()}
            for number, order in enumerate(orders):
                masks[f"mask.{number}"][prompt:, order[round(kept_share * len(order)) :]] = 0
            (logits,) = session.run([task.output], {**feeds, **masks})
            part_logs = log_probabilities(logits[0, prompt:])
            divergence = (np.exp(full_logs) * (full_logs - part_logs)).sum(axis=-1)
            same_choice = full_logs.argmax(axis=-1) == part_logs.argmax(axis=-1)
            results.setdefault((name, kept_share), []).append(np.stack([divergence, same_choice]))
    table = Table("text", "neurons", "weights read", "KL, nats", "same first choice")
    for (name, kept_share), figures in results.items():
        kl, same_choice = np.concatenate(figures, axis=1).mean(axis=1)
        weights_read = 1 - (1 - kept_share) * inner / weight_count
        table.add_row(name, f"{kept_share:.0%}", f"{weights_read:.2f}", f"{kl:.3f}", f"{same_choice:.1%}")
        rows.append(
            {"text": name, "share": kept_share, "read": weights_read, "kl": float(kl), "same": float(same_choice)}
        )
    Console().print(table)
    if json_file is not None:
        json_file.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
