"""Time a decode step of a layer of latent attention (DeepSeek-V2-Lite's sizes) by the form of its cache.

    python tools/bench/latent.py --past 8k --rounds 15

The forms take turns, so their ratios hold on a busy machine. The projections of queries and outputs are the same in all
of them and left out.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import typer

# Run as a script, Python looks for modules in tools/ only.
sys.path.insert(0, str(Path(__file__).parents[2]))
from graphopt.graph.weights import new_weight
from graphopt.passes.registry import PASSES
from graphopt.runtime_ops import DOMAIN, library_path
from graphopt.runtime_ops.kv_attention.spec.attributes import KVAttributes

HEADS, RANK, ROTARY, KEY, VALUE = 16, 512, 64, 128, 128
SCALE = (KEY + ROTARY) ** -0.5
FLOAT = ir.DataType.FLOAT


class Graph:
    """Builds a graph with random weights."""

    def __init__(self, ports: dict[str, list[Any]]) -> None:
        self.inputs = {name: ir.val(name, FLOAT, shape) for name, shape in ports.items()}
        self.graph = ir.Graph(
            list(self.inputs.values()), [], nodes=[], opset_imports={"": 23, DOMAIN: 1}, name="latent"
        )
        self.random = np.random.default_rng(0)

    def op(
        self, op_type: str, inputs: Sequence[ir.Value | None], *dims: Sequence[Any], domain: str = "", **attributes: Any
    ) -> Any:
        """Return the outputs of a new node, one for each shape of ``dims``; a single one without a list."""
        name = f"{op_type}.{len(list(self.graph))}"
        node = ir.node(op_type, inputs, attributes, domain=domain, num_outputs=len(dims), name=name)
        for index, (value, shape) in enumerate(zip(node.outputs, dims, strict=True)):
            value.name, value.dtype, value.shape = f"{name}.{index}", FLOAT, ir.Shape(shape)
        self.graph.append(node)
        return node.outputs[0] if len(dims) == 1 else list(node.outputs)

    def weight(self, name: str, *shape: int) -> ir.Value:
        """Return a random matrix that keeps the size of what it multiplies."""
        matrix = self.random.standard_normal(shape) / shape[-2] ** 0.5
        return new_weight(self.graph, name, ir.tensor(matrix.astype(np.float32)))

    def integers(self, numbers: list[int]) -> ir.Value:
        """Return a constant."""
        return new_weight(self.graph, f"c{len(self.graph.initializers)}", ir.tensor(np.array(numbers, np.int64)))

    def model(self, *outputs: ir.Value) -> ir.Model:
        """Return the model with these outputs."""
        self.graph.outputs.extend(outputs)
        return ir.Model(self.graph, ir_version=11)


def made_from_latents() -> ir.Model:
    """Return the exporters' form: the cache holds latents, and each step computes the keys and values of all tokens."""
    g = Graph(
        {
            "query": [1, HEADS, 1, KEY + ROTARY],
            "past_key_values.0.key": [1, 1, "past", RANK],
            "past_key_values.0.value": [1, 1, "past", ROTARY],
            "latent": [1, 1, 1, RANK],
            "rotary": [1, 1, 1, ROTARY],
        }
    )
    v = g.inputs
    latent = g.op("Concat", [v["past_key_values.0.key"], v["latent"]], [1, 1, "keys", RANK], axis=2)
    rotary = g.op("Concat", [v["past_key_values.0.value"], v["rotary"]], [1, 1, "keys", ROTARY], axis=2)
    width = HEADS * (KEY + VALUE)
    product = g.op("MatMul", [latent, g.weight("kv_b", RANK, width)], [1, 1, "keys", width])
    rows = g.op("Reshape", [product, g.integers([1, -1, HEADS, KEY + VALUE])], [1, "keys", HEADS, KEY + VALUE])
    heads = g.op("Transpose", [rows], [1, HEADS, "keys", KEY + VALUE], perm=[0, 2, 1, 3])
    dims: list[list[Any]] = [[1, HEADS, "keys", size] for size in (KEY, VALUE)]
    key, value = g.op("Split", [heads, g.integers([KEY, VALUE])], *dims, axis=-1)
    copies = g.op("Expand", [rotary, g.integers([1, HEADS, 1, 1])], [1, HEADS, "keys", ROTARY])
    full_key = g.op("Concat", [key, copies], [1, HEADS, "keys", KEY + ROTARY], axis=-1)
    y = g.op("Attention", [v["query"], full_key, value], [1, HEADS, 1, VALUE], scale=SCALE)
    return g.model(y, latent, rotary)


def absorb_latents() -> ir.Model:
    """Return the same graph after the pass ``absorb_latent``."""
    model = made_from_latents()
    report = PASSES["absorb_latent"]()(model).report
    assert not report.skips, report.skips
    return model


def per_head_cache() -> ir.Model:
    """Return attention over a cache of the keys and values of each head."""
    g = Graph(
        {
            "query": [1, HEADS, 1, KEY + ROTARY],
            "key": [1, HEADS, 1, KEY + ROTARY],
            "value": [1, HEADS, 1, VALUE],
            "past_key_values.0.key": [1, HEADS, "past", KEY + ROTARY],
            "past_key_values.0.value": [1, HEADS, "past", VALUE],
            "latent": [1, 1, 1, RANK],
        }
    )
    v, width = g.inputs, HEADS * (KEY + VALUE)
    # the product that makes keys and values of the new token
    product = g.op("MatMul", [v["latent"], g.weight("kv_b", RANK, width)], [1, 1, 1, width])
    outputs: list[list[Any]] = [[1, HEADS, 1, VALUE], [1, HEADS, "keys", KEY + ROTARY], [1, HEADS, "keys", VALUE]]
    names = ("query", "key", "value")
    new = [v[name] for name in names]
    pasts = [v["past_key_values.0.key"], v["past_key_values.0.value"]]
    y, keys, values = g.op("Attention", [*new, None, *pasts], *outputs, scale=SCALE)
    return g.model(y, keys, values, product)


def paged_latents(attributes: KVAttributes) -> ir.Model:
    """Return ``KVAttention`` over pages of latents, with the products of queries and outputs."""
    states = attributes.state(1, "pages", RANK + ROTARY)
    g = Graph({"query": [1, HEADS, 1, KEY + ROTARY], "row": [1, 1, RANK + ROTARY]})
    ports = [ir.val(name, ir.DataType.INT64, [1]) for name in ("past", "new")]
    ports += [ir.val(name, ir.DataType.from_numpy(t.dtype), list(t.shape)) for name, t in states]
    g.graph.inputs.extend(ports)
    sizes: list[list[Any]] = [[1, HEADS, 1, size] for size in (KEY, ROTARY)]
    parts = g.op("Split", [g.inputs["query"], g.integers([KEY, ROTARY])], *sizes, axis=-1)
    latent_query = g.op("MatMul", [parts[0], g.weight("up", HEADS, KEY, RANK)], [1, HEADS, 1, RANK])
    query = g.op("Concat", [latent_query, parts[1]], [1, HEADS, 1, RANK + ROTARY], axis=-1)
    rows = g.op("Reshape", [query, g.integers([1, 1, -1])], [1, 1, HEADS * (RANK + ROTARY)])
    no_numbers = new_weight(g.graph, "nothing", ir.tensor(np.zeros(0, np.float32)))
    inputs = [rows, g.inputs["row"], no_numbers, *ports[:2], no_numbers, no_numbers, *ports[2:]]
    dims: list[list[Any]] = [[1, 1, HEADS * RANK], *(list(tensor.shape) for _, tensor in states)]
    y, *after = g.op("KVAttention", inputs, *dims, domain=DOMAIN, **attributes.for_node())
    for value, port in zip(after, ports[2:], strict=True):
        value.dtype = port.dtype
    heads = g.op("Reshape", [y, g.integers([1, HEADS, 1, RANK])], [1, HEADS, 1, RANK])
    out = g.op("MatMul", [heads, g.weight("down", HEADS, RANK, VALUE)], [1, HEADS, 1, VALUE])
    return g.model(out, *after)


class Form:
    """A session with its inputs bound once; pages are updated in place, growing caches are new outputs of each step."""

    def __init__(self, model: ir.Model, past: int, attributes: KVAttributes | None, threads: int) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.register_custom_ops_library(str(library_path()))
        self.session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options)
        random, state = np.random.default_rng(1), {}
        if attributes is not None:
            state = attributes.state(1, past // attributes.page + 1, RANK + ROTARY).zeros()
            state |= {"past": np.array([past]), "new": np.array([1])}
        self.binding, self.bytes = self.session.io_binding(), 0
        self.values = {}
        for port in self.session.get_inputs():
            dims = [past if dim == "past" else dim for dim in port.shape]
            array = state.get(port.name)
            if array is None:
                array = random.standard_normal(dims).astype(np.float32)
            if "past_key" in port.name or (port.name in state and port.name not in ("past", "new")):
                self.bytes += array.nbytes
            self.values[port.name] = onnxruntime.OrtValue.ortvalue_from_numpy(array)
            self.binding.bind_ortvalue_input(port.name, self.values[port.name])
        outputs = self.session.get_outputs()
        self.binding.bind_output(outputs[0].name)
        names = ["keys", "values", "scales", "recent", "summaries"] if attributes is not None else []
        for index, output in enumerate(outputs[1:]):
            if names:
                self.binding.bind_ortvalue_output(output.name, self.values[names[index]])
            else:
                self.binding.bind_output(output.name)

    def outputs(self) -> list[np.ndarray]:
        """Run a step; return its outputs."""
        self.session.run_with_iobinding(self.binding)
        results: list[np.ndarray] = self.binding.copy_outputs_to_cpu()
        return results

    def seconds(self) -> float:
        """Run a step; return its seconds."""
        start = time.perf_counter()
        self.session.run_with_iobinding(self.binding)
        return time.perf_counter() - start


def main(
    past: Annotated[str, typer.Option(help="tokens in the cache, such as 8k")] = "8k",
    rounds: Annotated[int, typer.Option(min=1, help="of timing")] = 15,
    threads: Annotated[int, typer.Option(min=1)] = 2,
) -> None:
    """Print milliseconds and bytes of a token by form."""
    tokens = int(past[:-1]) * 1024 if past.endswith("k") else int(past)
    pages = {
        storage: KVAttributes(1, SCALE, storage=storage, value_size=RANK)
        for storage in ("float32", "float16", "int8", "int4")
    }
    forms = {
        "latents cached, keys and values made again": (made_from_latents(), None),
        "keys and values of heads cached": (per_head_cache(), None),
        "latents absorbed, cache grows": (absorb_latents(), None),
        **{
            f"latents in pages, {storage}": (paged_latents(attributes), attributes)
            for storage, attributes in pages.items()
        },
    }
    sessions = {name: Form(model, tokens, attributes, threads) for name, (model, attributes) in forms.items()}
    times: dict[str, list[float]] = {name: [] for name in sessions}
    for _ in range(rounds + 2):
        for name, form in sessions.items():
            times[name].append(form.seconds())
    slowest = median(times["keys and values of heads cached"][2:])
    for name, form in sessions.items():
        step = median(times[name][2:])
        print(f"{name:45} {1e3 * step:8.2f} ms  {slowest / step:6.2f}x  {form.bytes / tokens:8.0f} bytes a token")


if __name__ == "__main__":
    typer.run(main)
