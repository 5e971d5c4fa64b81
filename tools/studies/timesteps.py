"""Ranges of a denoiser's activations: one, one for each group of timesteps (APQ-DM, ViDiT-Q), or those of each call.

    python tools/studies/timesteps.py                    # trains a small UNet on drawn shapes, two minutes of processor
    python tools/studies/timesteps.py --steps 800 --groups 2,4,8

A UNet2DModel of diffusers (16 x 16 pixels, 0.7 million weights) learns discs, squares and crosses, so that its samples
are of something. Convolutions multiply codes in all rows but the first; matrices, norms and the convolution that reads
the noisy sample stay in floats. Weights have 7 bits with AVX2 and no VNNI, else 8, as `quantize_convolutions` has them.

    one range     `quantize_convolutions` with calls of all timesteps: `QLinearConv` of constant scales
    N groups      the same with calls of each group of timesteps by itself; scales, zero points and biases of
                  onnxruntime's fused graphs are stacked, and a `Gather` by the timestep picks a row
    corrected     of one range: the mean error of rounding in the output is subtracted in each group (QNCD)
    each call     `DynamicQuantizeLinear -> ConvInteger` for each convolution: ranges of the tensor at hand

All of it is standard ONNX except `QLinearAdd` and the like, which are onnxruntime's own. Samples are those of DDIM in
20 steps from 8 seeds that are not used in calibration; their cosine and relative error are relative to samples of the
float model, and those of single calls to its outputs in its own loops. Times are the processor time of a call of batch
1, one thread, the least of interleaved rounds.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import onnx
import onnxruntime
import typer
from onnx import TensorProto, helper, numpy_helper

# Run as a script, Python looks for modules in tools/ only.
sys.path.insert(0, str(Path(__file__).parents[2]))
import graphopt
from graphopt.inference.sampling import sampling_loop
from graphopt.passes.recipe import Recipe
from graphopt.tasks.denoiser import TIMESTEP, TIMESTEPS
from tools.bench.parts.machine import OtherLoad, describe

SIDE, BATCH, LOOP, SEEDS, CALIBRATION = 16, 16, 20, 8, 4
SCHEDULER = {"_class_name": "DDIMScheduler", "clip_sample": True}
SAMPLE, OUTPUT, GROUP = "sample", "out_sample", "timestep_group"
EXACT = ("canonicalize", "fold_constants", "fold_batch_norms")

Feeds = dict[str, np.ndarray]
Denoise = Callable[[Mapping[str, Any]], Any]


def shapes(count: int, seed: int) -> np.ndarray:
    """Return images of discs, squares and crosses, float32 [count, 1, 16, 16] from -1 to 1."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[:SIDE, :SIDE]
    images = np.empty((count, 1, SIDE, SIDE), np.float32)
    for image in images:
        (row, column), size = random.uniform(4, 12, 2), random.uniform(2, 5)
        dy, dx = np.abs(y - row), np.abs(x - column)
        distance = (np.hypot(dy, dx), np.maximum(dy, dx), np.where(np.minimum(dy, dx) < 1, np.maximum(dy, dx), 9))
        image[0] = np.clip(2 * (size - distance[random.integers(3)]), -1, 1)
    return images


def train(folder: Path, steps: int) -> None:
    """Train a UNet to predict the noise in such images, print its loss, and write its checkpoint."""
    import torch

    diffusers: Any = importlib.import_module("diffusers")
    torch.manual_seed(0)
    torch.set_num_threads(1)  # threads that wait for one another spin
    kinds = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    sizes = {"block_out_channels": (32, 64), "layers_per_block": 1, "attention_head_dim": 8, "norm_num_groups": 8}
    model = diffusers.UNet2DModel(sample_size=SIDE, in_channels=1, out_channels=1, **sizes, **kinds)
    noise_schedule = diffusers.DDPMScheduler()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    losses = []
    for step in range(steps):
        images = torch.from_numpy(shapes(BATCH, step))
        noise, moments = torch.randn_like(images), torch.randint(0, TIMESTEPS, (BATCH,))
        prediction = model(noise_schedule.add_noise(images, noise, moments), moments).sample
        loss = torch.nn.functional.mse_loss(prediction, noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rate.step()
        losses.append(loss.item())
    print(f"loss {np.mean(losses[:20]):.3f} -> {np.mean(losses[-50:]):.4f} after {steps} steps", flush=True)
    model.save_pretrained(folder)


def session_of(model: Path | onnx.ModelProto) -> onnxruntime.InferenceSession:
    """Open a model with one thread, whose threads wait for no others."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    content = str(model) if isinstance(model, Path) else model.SerializeToString()
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def denoiser_of(session: onnxruntime.InferenceSession, calls: list[Feeds] | None = None) -> Denoise:
    """Return a function that calls a model and appends its inputs to ``calls``."""

    def denoise(call: Mapping[str, Any]) -> Any:
        if calls is not None:
            calls.append({name: np.array(array) for name, array in call.items()})
        return session.run([OUTPUT], dict(call))[0]

    return denoise


def sample(denoise: Denoise, seed: int) -> np.ndarray:
    """Return the sample of a loop, flat float64."""
    noise = np.random.default_rng(seed).standard_normal((1, 1, SIDE, SIDE)).astype(np.float32)
    feeds: Feeds = {SAMPLE: noise, TIMESTEP: np.zeros(1, np.float32)}
    return np.asarray(sampling_loop(denoise, SCHEDULER, feeds, LOOP, seed), np.float64).ravel()


def group_of(call: Feeds, groups: int) -> int:
    """Return the group of a call, of equal parts of all timesteps."""
    return int(call[TIMESTEP].ravel()[0] * groups // TIMESTEPS)


def static(model: Path, calls: list[Feeds], folder: Path) -> onnx.ModelProto:
    """Return the fused graph of onnxruntime whose convolutions have the ranges of ``calls``."""
    folder.mkdir()
    arrays: dict[str, Any] = {name: np.stack([call[name] for call in calls]) for name in calls[0]}
    np.savez(folder / "calls.npz", **arrays)
    convolutions: dict[str, Any] = {"step": "quantize_convolutions", "activations": "static"}
    steps = [*({"step": name} for name in EXACT), convolutions]
    recipe = Recipe.model_validate({"name": "convolutions", "steps": steps})
    settings: dict[str, Any] = {"inputs": folder / "calls.npz", "quality_tokens": 0}
    graphopt.optimize(model, recipe, folder / "int8", **settings)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath, options.log_severity_level = str(folder / "int8" / "fused.onnx"), 3
    onnxruntime.InferenceSession(folder / "int8" / "model.onnx", options, providers=["CPUExecutionProvider"])
    return onnx.load(folder / "int8" / "fused.onnx")


def group_lookup(groups: int) -> tuple[list[onnx.NodeProto], dict[str, np.ndarray]]:
    """Return the nodes that compute the group of timesteps of a call, and their constants."""
    bounds = np.arange(1, groups, dtype=np.float32) * (TIMESTEPS / groups)
    nodes = [
        helper.make_node("Reshape", [TIMESTEP, "timestep_shape"], ["timestep_column"]),
        helper.make_node("GreaterOrEqual", ["timestep_column", "timestep_bounds"], ["is_behind"]),
        helper.make_node("Cast", ["is_behind"], ["behind"], to=TensorProto.INT64),
        helper.make_node("ReduceSum", ["behind", "timestep_axes"], [GROUP], keepdims=0),
    ]
    axes, shape = np.array([0, 1]), np.array([1, 1])
    return nodes, {"timestep_bounds": bounds[None], "timestep_axes": axes, "timestep_shape": shape}


def correct_output(
    model: onnx.ModelProto, calls: list[Feeds], answers: list[np.ndarray], groups: int
) -> onnx.ModelProto:
    """Return a graph whose output is corrected to be right on average: (y - offset) / gain of each group.

    So QNCD (arXiv:2403.20137) estimates the mean and the share of the noise of rounding at each step, and subtracts it.
    """
    session, result = session_of(model), onnx.ModelProto()
    result.CopyFrom(model)
    gains, offsets = np.ones(groups, np.float32), np.zeros(groups, np.float32)
    for group in range(groups):
        pairs = [(answer, call) for answer, call in zip(answers, calls, strict=True) if group_of(call, groups) == group]
        float_outputs = np.concatenate([answer.ravel() for answer, _ in pairs]).astype(np.float64)
        int8_outputs = np.concatenate([session.run([OUTPUT], call)[0].ravel() for _, call in pairs]).astype(np.float64)
        gains[group], offsets[group] = np.polyfit(float_outputs, int8_outputs, 1)
    lookups, constants = group_lookup(groups)
    constants |= {"gains": gains, "offsets": offsets}
    graph = result.graph
    for node in graph.node:
        node.output[:] = ["rounded_output" if name == OUTPUT else name for name in node.output]
    graph.node.extend(lookups)
    graph.node.extend(helper.make_node("Gather", [name, GROUP], [name[:-1]], axis=0) for name in ("gains", "offsets"))
    graph.node.append(helper.make_node("Sub", ["rounded_output", "offset"], ["output_without_offset"]))
    graph.node.append(helper.make_node("Div", ["output_without_offset", "gain"], [OUTPUT]))
    graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in constants.items())
    return result


def stack_constants(models: list[onnx.ModelProto]) -> onnx.ModelProto:
    """Return one graph of several that differ in constants alone: a `Gather` by the timestep picks those of a group.

    Raises:
        ValueError: they differ in more.
    """
    result = onnx.ModelProto()
    result.CopyFrom(models[0])
    graph = result.graph
    tables = [{tensor.name: tensor for tensor in model.graph.initializer} for model in models]
    wirings = [[(n.op_type, tuple(n.input), tuple(n.output)) for n in model.graph.node] for model in models]
    if any(wiring != wirings[0] for wiring in wirings) or any(table.keys() != tables[0].keys() for table in tables):
        raise ValueError("onnxruntime made graphs of unlike nodes")
    lookups, constants = group_lookup(len(models))
    common = []
    for name, tensor in tables[0].items():
        arrays = [numpy_helper.to_array(table[name]) for table in tables]
        if all(np.array_equal(array, arrays[0]) for array in arrays):
            common.append(tensor)
            continue
        constants[f"{name}.by_group"] = np.stack(arrays)
        lookups.append(helper.make_node("Gather", [f"{name}.by_group", GROUP], [name], axis=0))
    nodes = list(graph.node)
    del graph.node[:], graph.initializer[:]
    graph.node.extend([*lookups, *nodes])
    graph.initializer.extend([*common, *(numpy_helper.from_array(array, name) for name, array in constants.items())])
    return result


def dynamic(model: onnx.ModelProto, weights: onnx.ModelProto) -> onnx.ModelProto:
    """Return the float graph with `ConvInteger`, of the codes that ``weights`` has for the same nodes."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    graph = result.graph
    floats = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    integer_convs = {n.name: n for n in weights.graph.node if n.op_type == "QLinearConv"}
    codes = {tensor.name: numpy_helper.to_array(tensor) for tensor in weights.graph.initializer}
    count, nodes = 0, []
    for node in graph.node:
        if node.op_type != "Conv" or node.name not in integer_convs:
            nodes.append(node)
            continue
        product, name = integer_convs[node.name], f"dynamic_{count}"
        weight, scale = codes[product.input[3]], codes[product.input[4]]
        if weight.shape != floats[node.input[1]].shape:
            raise ValueError(f"{product.name} is not {node.name}")
        graph.initializer.append(numpy_helper.from_array(weight, f"{name}.codes"))
        graph.initializer.append(numpy_helper.from_array(scale.reshape(1, -1, 1, 1), f"{name}.scales"))
        parts = [f"{name}.{part}" for part in ("x", "step", "zero", "sum", "float", "factor")]
        nodes += [
            helper.make_node("DynamicQuantizeLinear", [node.input[0]], parts[:3]),
            helper.make_node("ConvInteger", [parts[0], f"{name}.codes", parts[2]], [parts[3]]),
            helper.make_node("Cast", [parts[3]], [parts[4]], to=TensorProto.FLOAT),
            helper.make_node("Mul", [parts[1], f"{name}.scales"], [parts[5]]),
        ]
        nodes[-3].attribute.extend(node.attribute)
        bias = len(node.input) > 2
        nodes.append(helper.make_node("Mul", [parts[4], parts[5]], [f"{name}.y" if bias else node.output[0]]))
        if bias:
            row = floats[node.input[2]].reshape(1, -1, 1, 1)
            graph.initializer.append(numpy_helper.from_array(row, f"{name}.bias"))
            nodes.append(helper.make_node("Add", [f"{name}.y", f"{name}.bias"], [node.output[0]]))
        count += 1
    if count != len(integer_convs):
        raise ValueError(f"{count} of {len(integer_convs)} convolutions with codes were met")
    del graph.node[:]
    graph.node.extend(nodes)
    return result


def cosine(first: np.ndarray, second: np.ndarray) -> float:
    """Return the cosine of two arrays."""
    first, second = (np.asarray(array, np.float64).ravel() for array in (first, second))
    return float(first @ second / np.linalg.norm(first) / np.linalg.norm(second))


def microseconds(sessions: dict[str, onnxruntime.InferenceSession], call: Feeds, rounds: int) -> dict[str, float]:
    """Return the least processor time of a call of each model, in microseconds."""
    samples: dict[str, list[float]] = {name: [] for name in sessions}
    for _ in range(rounds):
        for name, session in sessions.items():
            start = time.process_time()
            session.run([OUTPUT], call)
            samples[name].append(time.process_time() - start)
    return {name: min(times) * 1e6 for name, times in samples.items()}


def main(
    steps: Annotated[int, typer.Option(help="of training")] = 600,
    groups: Annotated[str, typer.Option(help="numbers of groups, with commas between")] = "2,4,10",
    rounds: Annotated[int, typer.Option(help="of times")] = 41,
) -> None:
    """Train, quantize, sample, and print a table."""
    load = OtherLoad()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        train(folder / "checkpoint", steps)
        graphopt.export(folder / "checkpoint", folder / "float32")
        exact = Recipe.model_validate({"name": "exact", "steps": [{"step": name} for name in EXACT]})
        graphopt.optimize(folder / "float32", exact, folder / "exact", quality_tokens=0)
        exact_model = onnx.load(folder / "exact" / "model.onnx")
        sessions = {"float32": session_of(exact_model)}
        calls: list[Feeds] = []
        for seed in range(100, 100 + CALIBRATION):
            sample(denoiser_of(sessions["float32"], calls), seed)
        one_range = static(folder / "float32", calls, folder / "one")
        sessions["one range"] = session_of(one_range)
        answers = [sessions["float32"].run([OUTPUT], call)[0] for call in calls]
        for count in map(int, groups.split(",")):
            sessions[f"one range, corrected in {count} groups"] = session_of(
                correct_output(one_range, calls, answers, count)
            )
            parts = [[call for call in calls if group_of(call, count) == group] for group in range(count)]
            models = [static(folder / "float32", part, folder / f"{count}-{n}") for n, part in enumerate(parts)]
            sessions[f"{count} groups"] = session_of(stack_constants(models))
        sessions["each call"] = session_of(dynamic(exact_model, one_range))
        float_calls: list[Feeds] = []
        float_samples = [sample(denoiser_of(sessions["float32"], float_calls), seed) for seed in range(SEEDS)]
        answers = [sessions["float32"].run([OUTPUT], call)[0] for call in float_calls]
        times = microseconds(sessions, float_calls[0], rounds)
        print("| ranges | cosine of samples | the worst | relative error, worst | of calls | us a call |")
        print("| --- | --- | --- | --- | --- | --- |")
        for name, session in sessions.items():
            samples = [sample(denoiser_of(session), seed) for seed in range(SEEDS)]
            pairs = list(zip(float_samples, samples, strict=True))
            cosines = [cosine(*pair) for pair in pairs]
            error = max(np.linalg.norm(b - a) / np.linalg.norm(a) for a, b in pairs)
            call_cosines = [cosine(a, session.run([OUTPUT], c)[0]) for a, c in zip(answers, float_calls, strict=True)]
            figures = f"{np.mean(cosines):.5f} | {min(cosines):.5f} | {error:.3f} | {np.mean(call_cosines):.5f}"
            print(f"| {name} | {figures} | {times[name]:.0f} |", flush=True)
    print(f"{describe()}; others took {load.share():.0%} of the cores")


if __name__ == "__main__":
    typer.run(main)
