"""Time `LinearRecurrence` beside onnxruntime's `com.microsoft::LinearAttention`, side by side in one process.

    python tools/bench/recurrence.py                                  # a gated delta rule, 32 heads of 128; a minute
    python tools/bench/recurrence.py --tokens 1,8,512 --rule linear
    python tools/bench/recurrence.py --shape mamba --rule gated       # thousands of channels, each a head of 16 x 1
    python tools/bench/recurrence.py --processor                      # processor time, on a busy machine
    python tools/bench/recurrence.py --scan --tokens 512              # beside a `Scan` of opset 17, the exporters' form

Calls go through the states of several layers in turn, as in a model, so that they are read from the same level of
memory. Engines take turns, in a new random order in each round, and a time is the median of all rounds. Outputs are
bound to buffers once. An engine that is off from the definition by more than 1e-4 of the largest number is an error.
"""

from __future__ import annotations

import functools
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import typer
from onnx import TensorProto, helper

# Run as a script, Python looks for modules in tools/ only.
sys.path.insert(0, str(Path(__file__).parents[2]))
from graphopt.ort.session import open_session
from graphopt.runtime_ops import DOMAIN, library_path
from graphopt.runtime_ops.linear_recurrence.spec.op import reference
from tests.graphs import run_pass
from tests.passes.lift.canonicalize.recurrences.common import attention

SHAPES = {"heads": (32, 32, 128, 128), "qwen3-next": (32, 16, 128, 128), "mamba2": (80, 1, 128, 64)}
SHAPES |= {"mamba": (5120, 1, 16, 1), "rg-lru": (2560, 2560, 1, 1)}
"""Heads, key heads, numbers of a key, of a value."""

RULES = {"linear": (0, False), "gated": (0, True), "delta": (1, False), "gated_delta": (1, True)}
INPUTS = ("query", "key", "value", "decay", "beta", "mask", "state")

Arrays = dict[str, np.ndarray]
Call = Callable[[Callable[[], float]], float]


def inputs_of(shape: tuple[int, int, int, int], rule: str, tokens: int, per_channel: bool) -> Arrays:
    """Return random inputs of `LinearRecurrence`: keys of length 1, decays near 0, as models have them."""
    heads, key_heads, channels, width = shape
    delta, is_gated = RULES[rule]
    numbers = np.random.default_rng(0)
    key = numbers.standard_normal((1, tokens, key_heads, channels))
    decays = (channels if per_channel else 1) if is_gated else 0
    inputs = {
        "query": numbers.standard_normal(key.shape),
        "key": key / np.linalg.norm(key, axis=-1, keepdims=True),
        "value": numbers.standard_normal((1, tokens, heads, width)),
        "decay": -numbers.uniform(0, 0.2, (1, tokens, heads, decays)),
        "beta": numbers.uniform(0, 1, (1, tokens, heads, delta)),
        "state": numbers.standard_normal((1, heads, channels, width)),
    }
    return {name: array.astype(np.float32) for name, array in inputs.items()} | {"mask": np.zeros((1, 0), np.int64)}


def session_of(node: onnx.NodeProto, feeds: Arrays, threads: int) -> onnxruntime.InferenceSession:
    """Open a model of one node."""
    types = {name: helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in feeds.items()}
    inputs = [helper.make_tensor_value_info(name, types[name], array.shape) for name, array in feeds.items()]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in node.output]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph([node], "one", inputs, outputs), opset_imports=opsets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # another engine's threads are its rivals
    options.register_custom_ops_library(str(library_path()))
    return onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])


class Engine:
    """One node, with bound inputs and outputs for each of several layers."""

    def __init__(self, node: onnx.NodeProto, feeds: Arrays, layers: int, threads: int, shapes: list[tuple[int, ...]]):
        self.session = session_of(node, feeds, threads)
        self.outputs = [np.zeros(shape, np.float32) for shape in shapes]
        self.bindings, self.layer = [], 0
        for _ in range(layers):
            binding = self.session.io_binding()
            for name, array in feeds.items():
                value = array.copy() if "state" in name else array
                binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(value))
            new_state = np.zeros(shapes[1], np.float32)
            for name, array in zip(node.output, (self.outputs[0], new_state), strict=True):
                binding.bind_ortvalue_output(name, onnxruntime.OrtValue.ortvalue_from_numpy(array))
            self.bindings.append(binding)

    def call(self, clock: Callable[[], float]) -> float:
        """Run the next layer; return its time in seconds."""
        binding = self.bindings[self.layer]
        self.layer = (self.layer + 1) % len(self.bindings)
        start = clock()
        self.session.run_with_iobinding(binding)
        return clock() - start

    def results(self) -> list[np.ndarray]:
        """Return the outputs of the first layer."""
        return [value.numpy() for value in self.bindings[0].get_outputs()]


def engines_of(feeds: Arrays, rule: str, layers: int, threads: int) -> dict[str, Engine]:
    """Return graphopt, and onnxruntime where it has the case, both checked against the definition."""
    delta, is_gated = RULES[rule]
    attributes: dict[str, Any] = {"delta": delta, "scale": 0.5}
    shapes = [feeds["value"].shape, feeds["state"].shape]
    graphopt_node = helper.make_node("LinearRecurrence", INPUTS, ["output", "new_state"], domain=DOMAIN, **attributes)
    engines = {"graphopt": Engine(graphopt_node, feeds, layers, threads, shapes)}
    heads, key_heads = feeds["value"].shape[2], feeds["query"].shape[2]
    flat = {name: array.reshape(*array.shape[:2], -1) for name, array in feeds.items() if array.ndim == 4}
    # onnxruntime has as many states as key heads: keys are repeated before the clock starts
    for name in ("query", "key"):
        flat[name] = np.repeat(feeds[name], heads // key_heads, axis=2).reshape(*feeds[name].shape[:2], -1)
    flat["past_state"] = feeds["state"]
    names = ["query", "key", "value", "past_state", "decay" if is_gated else "", "beta" if delta else ""]
    peer_attributes = {"q_num_heads": heads, "kv_num_heads": heads, "scale": 0.5, "update_rule": rule}
    node = helper.make_node(
        "LinearAttention", names, ["output", "new_state"], domain="com.microsoft", **peer_attributes
    )
    peer_feeds = {name: flat[name] for name in names if name}
    engines["onnxruntime"] = Engine(node, peer_feeds, layers, threads, [flat["value"].shape, shapes[1]])
    arguments: list[Any] = [feeds[name] for name in INPUTS]
    definition = reference(*arguments, **attributes)
    for name, engine in engines.items():
        for _ in range(layers):
            engine.call(time.perf_counter)
        for output, exact in zip(engine.results(), definition, strict=True):
            distance = np.abs(output.reshape(exact.shape) - exact).max() / np.abs(exact).max()
            if not distance < 1e-4:
                raise typer.BadParameter(f"{name} is wrong by {distance:.1e} of the largest number")
    return engines


def scan_engines(shape: tuple[int, int, int, int], rule: str, tokens: int, threads: int) -> dict[str, Call]:
    """Return a graph of one `Scan` of standard operators and the same after `canonicalize`, checked against it."""
    delta, is_gated = RULES[rule]
    heads, key_heads, channels, width = shape
    model = attention(
        delta=bool(delta), gated=is_gated, heads=heads, channels=channels, width=width, key_heads=key_heads
    ).scan()
    arrays, feeds = inputs_of(shape, rule, tokens, per_channel=False), {}
    letters = (
        {"query": "q", "key": "k", "value": "v"}
        | ({"decay": "g"} if is_gated else {})
        | ({"beta": "b"} if delta else {})
    )
    for name, letter in letters.items():
        by_token = arrays[name].swapaxes(0, 1)
        feeds[f"all_{letter}"] = np.ascontiguousarray(by_token[..., 0] if name == "decay" else by_token)
    feeds["initial"] = arrays["state"]
    sessions = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("Scan", "graphopt"):
            if name == "graphopt":
                run_pass(model, "canonicalize")
            ir.save(model, Path(folder) / "model.onnx")
            sessions[name] = open_session(Path(folder) / "model.onnx", threads=threads)
    scan_outputs, results = (session.run(None, feeds) for session in sessions.values())
    for scan_y, graphopt_y in zip(scan_outputs, results, strict=True):
        distance = np.abs(scan_y - graphopt_y).max() / np.abs(scan_y).max()
        if not distance < 1e-4:
            raise typer.BadParameter(f"the two differ by {distance:.1e} of the largest number")
    return {name: functools.partial(time_run, session, feeds) for name, session in sessions.items()}


def time_run(session: onnxruntime.InferenceSession, feeds: Arrays, clock: Callable[[], float]) -> float:
    """Run a session; return its time in seconds."""
    start = clock()
    session.run(None, feeds)
    return clock() - start


def main(
    tokens: Annotated[str, typer.Option(help="of a call, one count after the other")] = "1,2,4,8,64,512",
    shape: Annotated[str, typer.Option(help=", ".join(SHAPES))] = "heads",
    rule: Annotated[str, typer.Option(help=", ".join(RULES))] = "gated_delta",
    per_channel: Annotated[bool, typer.Option(help="a decay for each channel of the keys")] = False,
    layers: Annotated[int, typer.Option(min=1, help="states that calls go through")] = 8,
    seconds: Annotated[float, typer.Option(help="for each count of tokens")] = 4,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    scan: Annotated[bool, typer.Option("--scan", help="beside a `Scan` of standard operators instead")] = False,
    processor: Annotated[bool, typer.Option(help="time of processors, for machines that are busy")] = False,
) -> None:
    """Print the median time of a call, in microseconds."""
    clock = time.process_time if processor else time.perf_counter
    typer.echo(f"{shape} {SHAPES[shape]}, {rule}{' per channel' if per_channel else ''}, {threads} threads")
    for count in (int(word) for word in tokens.split(",")):
        if scan:
            calls = scan_engines(SHAPES[shape], rule, count, threads)
        else:
            engines = engines_of(inputs_of(SHAPES[shape], rule, count, per_channel), rule, layers, threads)
            calls = {name: engine.call for name, engine in engines.items()}
        times: dict[str, list[float]] = {name: [] for name in calls}
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            for name in random.sample(sorted(calls), len(calls)):
                times[name].append(calls[name](clock))
        medians = {name: statistics.median(durations) * 1e6 for name, durations in times.items()}
        ratio = medians["Scan" if scan else "onnxruntime"] / medians["graphopt"]
        columns = "  ".join(f"{name} {median:10.1f}" for name, median in medians.items())
        typer.echo(f"{count:5d} tokens  {columns}  x {ratio:.2f}")


if __name__ == "__main__":
    typer.run(main)
