"""Time the preset `int8` beside `onnxruntime.quantization.quantize_static` of the same graph, in one process.

    python tools/bench/convolutions.py                               # ResNet-18 and ViT-Small of random weights
    python tools/bench/convolutions.py detector.onnx --inputs images.npz
    python tools/bench/convolutions.py resnet --size 224 --threads 2 --rounds 31
    python tools/bench/convolutions.py vit --processor --rounds 41   # on a busy machine

Both are calibrated on the same samples and measured on others. onnxruntime's ranges are its default, the least and the
largest number of each tensor; graphopt's are its default, percentiles, and in a second row those of onnxruntime.
Figures are cosine and relative error of the output that changed most. onnxruntime's graph has its own preprocessing
(`quant_pre_process`) and QDQ form: once with its defaults (inputs and weights int8, one scale a tensor), once with
uint8 inputs and one scale for each output channel, which its kernels run fastest on x86. Engines take turns, in a new
random order in each round; times are medians, ratios medians of the ratios of each round.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import onnx
import onnx.version_converter
import onnxruntime
import typer

# Run as a script, Python looks for modules in tools/ only.
sys.path.insert(0, str(Path(__file__).parents[2]))
import graphopt
from graphopt.ort.runner import Runner
from graphopt.ort.session import open_session
from graphopt.runtime_ops.instructions import instructions_here
from graphopt.tasks import TASKS
from graphopt.tasks.graph.outputs import differences, outputs_of

if TYPE_CHECKING:
    from collections.abc import Callable

FLOAT, GRAPHOPT, BY_EXTREMES = "float32", "graphopt int8", "graphopt int8, minmax"
DEFAULT, BY_CHANNEL = "quantize_static, defaults", "quantize_static, uint8, by channel"
CLASSES = 100
_FIRST_BY_CHANNEL = 13  # the first opset whose codes have a scale for each channel

Feeds = dict[str, np.ndarray]


def write_checkpoint(kind: str, size: int, folder: Path) -> None:
    """Write a checkpoint of random weights whose batch normalization has the statistics of random images."""
    import torch
    import transformers

    torch.manual_seed(0)
    if kind == "resnet":
        sizes_of_stages = [64, 128, 256, 512]
        settings: dict[str, Any] = {"embedding_size": 64, "hidden_sizes": sizes_of_stages, "depths": [2, 2, 2, 2]}
        settings |= {"layer_type": "basic", "num_labels": CLASSES}
        config = transformers.ResNetConfig(**settings)
        model: Any = transformers.ResNetForImageClassification(config)
    else:
        settings = {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6, "intermediate_size": 1536}
        settings |= {"image_size": size, "patch_size": 16, "num_labels": CLASSES}
        model = transformers.ViTForImageClassification(transformers.ViTConfig(**settings))
    model.train()
    with torch.no_grad():
        for _ in range(4):
            model(torch.randn(4, 3, size, size))
    model.eval().save_pretrained(folder)
    processor = "ConvNextImageProcessor" if kind == "resnet" else "ViTImageProcessor"
    sizes = {"shortest_edge": size} if kind == "resnet" else {"height": size, "width": size}
    settings = {"image_processor_type": processor, "size": sizes, "crop_pct": 0.875}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))


def samples_of(model: Path, inputs: Path | None, count: int) -> list[Feeds]:
    """Return what the model is fed, sample by sample."""
    artifact = graphopt.read(model)
    task: Any = TASKS[artifact.manifest.task].with_inputs(inputs)
    task.sample_feeds(artifact.model, Runner(), count)
    samples: list[Feeds] = task.samples.feeds(artifact.model.graph, count)
    return samples


class Samples:
    """Samples in the form that onnxruntime's calibration reads.

    Args:
        feeds: the samples.
    """

    def __init__(self, feeds: list[Feeds]) -> None:
        self._iterator = iter(feeds)

    def get_next(self) -> Feeds | None:
        """Return the next sample, or `None` after the last."""
        return next(self._iterator, None)


def quantize_static(source: Path, target: Path, feeds: list[Feeds], *, by_channel: bool) -> Path:
    """Write a graph as onnxruntime's own quantization quantizes it."""
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quant_pre_process
    from onnxruntime.quantization import quantize_static as quantize

    single_file, prepared_file = target.with_suffix(".whole.onnx"), target.with_suffix(".ready.onnx")
    model = onnx.load(source)
    opset = next(entry.version for entry in model.opset_import if not entry.domain)
    if opset < _FIRST_BY_CHANNEL:  # it would write a file that onnxruntime refuses
        model = onnx.version_converter.convert_version(model, _FIRST_BY_CHANNEL)
    onnx.save(model, single_file)  # it does not follow links to data beside a file
    quant_pre_process(str(single_file), str(prepared_file), skip_symbolic_shape=True)
    CalibrationDataReader.register(Samples)
    options = {"activation_type": QuantType.QUInt8, "per_channel": True} if by_channel else {}
    quantize(str(prepared_file), str(target), Samples(feeds), **options)
    return target


def session_of(path: Path, threads: int, entries: dict[str, str] | None = None) -> onnxruntime.InferenceSession:
    """Open a model whose threads do not spin while others are timed."""
    spinning = {"session.intra_op.allow_spinning": "0"}
    return open_session(path, threads=threads, entries={**(entries or {}), **spinning})


def bench(
    model: Path, inputs: Path | None, count: int, threads: int, rounds: int, folder: Path, clock: Callable[[], float]
) -> None:
    """Quantize a model both ways, compare and time them."""
    feeds = samples_of(model, inputs, 2 * count)
    first, last = feeds[: len(feeds) // 2], feeds[len(feeds) // 2 :]
    calibration = folder / "calibration.npz"
    arrays: dict[str, Any] = {name: np.stack([sample[name] for sample in first]) for name in first[0]}
    np.savez(calibration, **arrays)
    recipes = {GRAPHOPT: "percentile", BY_EXTREMES: "minmax"}
    artifacts = {}
    for name, ranges in recipes.items():
        recipe = graphopt.load_recipe("int8", options=[f"quantize_convolutions.ranges={ranges}"])
        settings: dict[str, Any] = {"target": "ort-cpu", "inputs": calibration, "quality_tokens": 0}
        artifacts[name] = graphopt.optimize(model, recipe, folder / ranges, **settings)
    source = model / "model.onnx" if model.is_dir() else model
    files = {FLOAT: source, **{name: folder / ranges / "model.onnx" for name, ranges in recipes.items()}}
    for name, by_channel in ((DEFAULT, False), (BY_CHANNEL, True)):
        files[name] = quantize_static(source, folder / f"static-{by_channel}.onnx", first, by_channel=by_channel)
    entries = {name: artifact.manifest.session for name, artifact in artifacts.items()}
    sessions = {name: session_of(file, threads, entries.get(name)) for name, file in files.items()}
    names = [node.name for node in sessions[FLOAT].get_outputs()]
    runs = {
        name: [outputs_of(session.run(names, sample), names) for sample in last] for name, session in sessions.items()
    }
    times: dict[str, list[float]] = {name: [] for name in sessions}
    for number in range(rounds + 1):
        for name in random.sample(list(sessions), len(sessions)):
            start = clock()
            sessions[name].run(names, last[number % len(last)])
            if number:  # the first call sets up
                times[name].append(1e3 * (clock() - start))
    print(
        f"{model.name}, {len(first)} samples to calibrate, {len(last)} others, {threads} threads, {instructions_here()}"
    )
    for name in sessions:
        worst = min(differences(runs[FLOAT], runs[name]).values(), key=lambda difference: difference.cosine)
        ratio = statistics.median(a / b for a, b in zip(times[name], times[BY_CHANNEL], strict=True))
        size = sum(file.stat().st_size for file in files[name].parent.glob(f"{files[name].name}*")) / 1e6
        print(
            f"  {name:36} {statistics.median(times[name]):8.2f} ms, least {min(times[name]):8.2f}  "
            f"{ratio:5.2f} of the last  {size:7.2f} MB  cosine {worst.cosine:.5f}  "
            f"relative error {worst.relative_error:.4f}"
        )


def main(
    models: Annotated[list[str] | None, typer.Argument(help="files, artifacts, or resnet and vit")] = None,
    inputs: Annotated[Path | None, typer.Option(help="samples; random ones without")] = None,
    samples: Annotated[int, typer.Option(help="to calibrate, and as many to compare")] = 8,
    size: Annotated[int, typer.Option(help="of images of resnet and vit")] = 224,
    threads: Annotated[int, typer.Option(help="of onnxruntime")] = 1,
    rounds: Annotated[int, typer.Option(help="of timing")] = 15,
    processor: Annotated[bool, typer.Option(help="time of the processor, where others are busy too")] = False,
) -> None:
    """Compare the preset int8 with onnxruntime's static quantization."""
    with tempfile.TemporaryDirectory() as name:
        for model in models or ["resnet", "vit"]:
            folder = Path(name) / Path(model).stem
            folder.mkdir()
            path = Path(model)
            if model in ("resnet", "vit"):
                write_checkpoint(model, size, folder / "checkpoint")
                path = folder / "float32"
                graphopt.export(folder / "checkpoint", path)
            clock = time.process_time if processor else time.perf_counter
            bench(path, inputs, samples, threads, rounds, folder, clock)


if __name__ == "__main__":
    typer.run(main)
