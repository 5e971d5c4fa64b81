"""Quality over bytes: presets of graphopt beside quantizers of onnxruntime, Olive and llama.cpp, on one model and text.

    python tools/bench/quality.py smollm2.gguf -o work                                  # ours, onnxruntime's, Olive's
    python tools/bench/quality.py smollm2.gguf -o work --llama-quantize llama.cpp/build/bin/llama-quantize
    python tools/bench/quality.py stdlib_lm -o work                                     # a model in floats

Weights of a GGUF file are on a grid of codes; they get noise of half a step (seed 0), so that no engine profits from
the grid. Any other model is used unchanged: an input of ``graphopt export``, or a folder that it made. Every row is
compared with the float model on the text of the verdict (docs/quality.md): half English, half Python, which no engine
is calibrated on. MB are those of all weights.

llama.cpp's files are decoded and run as floats, with inputs in floats; graphopt's and onnxruntime's run as in an app.
llama.cpp's rows need a GGUF file, or the checkpoint of a Llama, of which a GGUF file is written.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

# Run as a script, Python looks for modules in tools/ only.
sys.path.insert(0, str(Path(__file__).parents[2]))
import graphopt
from graphopt.analysis.structure.products import linear_nodes
from graphopt.artifact import artifact
from graphopt.artifact.tokens import texts_of
from graphopt.compile.calibration.inputs import collect
from graphopt.errors import GraphoptError
from graphopt.graph.weights.expression import nodes_below
from graphopt.models.export import shipped_models
from graphopt.models.gguf.checkpoint import empty_model, expressions_of
from graphopt.passes.lift.canonicalize import Canonicalize
from graphopt.passes.recipe import Recipe
from graphopt.quality.compare import Quality, compare
from graphopt.quality.texts import held_out_texts
from graphopt.quantization.gguf.blocks import Ggml
from graphopt.quantization.gguf.file import GgufFile, open_gguf
from graphopt.quantization.statistics.options import CalibrationOptions
from graphopt.tasks import task_of
from tools.bench.parts.gguf_file import write_gguf
from tools.bench.peers import gguf as llama_cpp
from tools.bench.peers import nbits, olive
from tools.studies.real.dither import add_noise, dither, put_weights

RECIPES = ("int3", "int4-rtn", "int4", "nf4", "small", "medium", "fp6", "large")
KINDS = ("IQ2_XS", "Q2_K", "IQ3_XXS", "IQ3_S", "Q3_K_M", "IQ4_XS", "Q4_K_M", "Q5_K_M", "Q6_K")
_WINDOW = 512
# Windows of text for onnxruntime's GPTQ, which runs the model on each, once for every input of a product.
_WINDOWS = 8


@dataclass(frozen=True)
class Row:
    """One artifact.

    Attributes:
        engine: whose quantizer made it.
        name: of the method.
        bytes: of its weights.
        quality: relative to the float model.
    """

    engine: str
    name: str
    bytes: int
    quality: Quality

    def __str__(self) -> str:
        quality = self.quality
        return (
            f"| {self.engine} | {self.name} | {self.bytes / 1e6:.1f} | "
            f"{quality.kl_mean:.4f} +- {quality.kl_error:.4f} | {quality.kl_99:.3f} | "
            f"{quality.same_first_choice:.1%} | {quality.perplexity:.2f} |"
        )


@dataclass(frozen=True)
class Bench:
    """The float model, and the folder of all artifacts.

    Attributes:
        file: a GGUF file of the model; ``None`` where there is none.
        source: the export of the model, with its own weights.
        floats: the artifact that every row is compared with.
        folder: where artifacts go.
        tokens: of text that is scored.
    """

    file: Path | None
    source: Path
    floats: Path
    folder: Path
    tokens: int

    def row(self, engine: str, name: str, folder: Path, size: int) -> Row:
        """Compare an artifact, or a folder with a model, with the float model."""
        return Row(
            engine, name, size, compare(self.floats, folder, held_out_texts(), tokens=self.tokens, window=_WINDOW)
        )

    def preset(self, recipe: str) -> Row:
        """Return the row of a preset or recipe."""
        folder = self.folder / "made"
        statistics = self.folder / "statistics"
        result = graphopt.optimize(
            self.floats, recipe, folder, overwrite=True, quality_tokens=0, statistics=statistics, target="ort-cpu"
        )
        assert result.manifest.weights is not None
        return self.row("graphopt", Path(recipe).stem, folder, result.manifest.weights.bytes)

    def onnxruntime(self, method: str, group: int) -> Row:
        """Return the row of one of onnxruntime's quantizers."""
        folder, feeds = self.folder / "nbits", self.feeds() if method == "GPTQ" else ()
        size = nbits.quantize(self.canonical(), method, group, folder, feeds)
        return self.row("onnxruntime", f"{method}, groups of {group}", folder, size)

    def olive(self, method: str, group: int) -> Row:
        """Return the row of one of Olive's quantizers."""
        folder, hessians = self.folder / "olive", {}
        if method == "GPTQ":
            statistics = collect(self.floats, "int4", self.folder / "statistics")
            hessians = {entry.value: entry.hessian().numpy() for entry in statistics}
        size = olive.quantize(self.canonical(), method, group, folder, hessians)
        return self.row("Olive", f"{method}, groups of {group}", folder, size)

    def canonical(self) -> Path:
        """Return the folder of the model that quantizers of ONNX graphs start from."""
        plain = self.folder / "canonical"
        if not plain.exists():
            graphopt.optimize(self.floats, Recipe(name="canonical", steps=(Canonicalize(),)), plain)
        return plain

    def feeds(self) -> list[dict[str, np.ndarray]]:
        """Return the calibration inputs of onnxruntime's GPTQ: a few windows of graphopt's own calibration text."""
        source = artifact.read(self.floats)
        options = CalibrationOptions(windows=_WINDOWS, window=_WINDOW)
        texts = texts_of(source.companions, options, source.manifest.model.max_positions)
        graph = source.model.graph
        return [dict(task_of(graph).text_feeds(graph, text[None])) for text in texts]

    def llama_cpp(self, binary: Path, kinds: list[str]) -> Iterator[Row]:
        """Yield a row for each type of llama.cpp's; needs a model from a GGUF file."""
        assert self.file is not None
        file = open_gguf(self.file)
        floats, importance = self.folder / "floats.gguf", self.folder / "importance.dat"
        if not floats.exists():
            llama_cpp.write_floats(add_noise(file, 0), floats)
        llama_cpp.write_importance(self.mean_squares(file), importance)
        for kind in kinds:
            quantized_file = llama_cpp.quantize(binary, floats, kind, importance, self.folder / "quantized.gguf")
            # The float model's weights are the file's with noise, so the artifact is made of what was exported.
            put_weights(self.source, file, quantized_file, f"{kind} of {self.file.name}", self.folder / "decoded")
            name = f"{kind} ({llama_cpp.kinds(quantized_file)})"
            yield self.row("llama.cpp", name, self.folder / "decoded", llama_cpp.weight_bytes(quantized_file))

    def mean_squares(self, file: GgufFile) -> dict[str, np.ndarray]:
        """Return the mean squares of the inputs of each product, by the name of its tensor in the file."""
        statistics = {entry.value: entry for entry in collect(self.floats, "int4", self.folder / "statistics")}
        parts = expressions_of(file, empty_model(file))
        names = {tensor: name for name, tensor in file.tensors.items()}
        squares: dict[str, np.ndarray] = {}
        for node in linear_nodes(artifact.read(self.floats).model.graph):
            x, weight = node.inputs
            assert weight is not None
            assert x is not None
            expression = parts.get(weight.name or "")
            tensors = [] if expression is None else [part for part in nodes_below(expression) if isinstance(part, Ggml)]
            for tensor in tensors:
                squares[names[tensor]] = np.diagonal(statistics[x.name or ""].hessian().numpy())
        return squares


def open_bench(model: str, output: Path, tokens: int) -> Bench:
    """Return a bench for a model: its float artifact is made in ``output`` unless it exists."""
    floats, source = output / "floats", output / "exported"
    if (Path(model) / artifact.MODEL).is_file():
        return Bench(None, Path(model), Path(model), output, tokens)
    is_gguf = model.endswith(".gguf")
    if not (source if is_gguf else floats).exists():
        graphopt.export(model, source if is_gguf else floats)
    if not is_gguf:
        return Bench(
            write_checkpoint_gguf(shipped_models().get(model, Path(model)), output), floats, floats, output, tokens
        )
    if not floats.exists():
        dither(source, Path(model), floats)
    return Bench(Path(model), source, floats, output, tokens)


def write_checkpoint_gguf(checkpoint: Path, output: Path) -> Path | None:
    """Return a GGUF file of a checkpoint, written to ``output``; ``None`` unless it is a Llama in one file."""
    config, file = checkpoint / "config.json", output / "checkpoint.gguf"
    if not config.is_file() or not (checkpoint / "model.safetensors").is_file():
        return None
    if json.loads(config.read_text())["model_type"] != "llama":
        return None
    write_gguf(checkpoint, file, tokenizer=True)
    return file


def main(
    model: Annotated[str, typer.Argument(help="a GGUF file in Q4_0, Q4_1, Q5_0, Q5_1 or Q8_0, or a model in floats")],
    output: Annotated[Path, typer.Option("-o", "--output", help="where artifacts and statistics go")],
    recipe: Annotated[list[str] | None, typer.Option(help="presets or files, instead of the usual ones")] = None,
    tokens: Annotated[int, typer.Option(min=2, help="of held-out text to score")] = 2048,
    group: Annotated[list[int] | None, typer.Option(help="groups of onnxruntime's and Olive's quantizers")] = None,
    method: Annotated[list[str] | None, typer.Option(help="methods of theirs, instead of all")] = None,
    llama_quantize: Annotated[Path | None, typer.Option(help="llama.cpp's program; without it its rows fail")] = None,
    kind: Annotated[list[str] | None, typer.Option(help="types of llama.cpp's, instead of the usual ones")] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="graphopt, onnxruntime, Olive, llama.cpp: some of them")
    ] = None,
) -> None:
    """Make every row, print it as it comes, and the rows that are best for their bytes at the end."""
    output.mkdir(parents=True, exist_ok=True)
    bench, engines = open_bench(model, output, tokens), only or ["graphopt", "onnxruntime", "Olive", "llama.cpp"]
    print("| engine | way | MB | divergence, nats | 99% | same first choice | perplexity |")
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    jobs: list[Callable[[], Row]] = []
    if "graphopt" in engines:
        jobs += [lambda name=name: bench.preset(name) for name in recipe or RECIPES]  # type: ignore[misc]
    if "onnxruntime" in engines:
        ways = [(name, size) for name in method or nbits.METHODS for size in group or [32]]
        jobs += [lambda way=way: bench.onnxruntime(*way) for way in ways]  # type: ignore[misc]
    if "Olive" in engines:
        ways = [(name, size) for name in method or olive.METHODS for size in group or [32]]
        jobs += [lambda way=way: bench.olive(*way) for way in ways]  # type: ignore[misc]
    rows: list[Row] = []
    for job in jobs:
        try:
            rows.append(job())
            print(rows[-1], flush=True)
        except (GraphoptError, ImportError, ValueError, RuntimeError) as error:
            print(f"| failed: {error} |", flush=True)
    if "llama.cpp" in engines and llama_quantize is not None and bench.file is None:
        print("| failed: llama.cpp's rows need a GGUF file, or a Llama's checkpoint |", flush=True)
    elif "llama.cpp" in engines and llama_quantize is not None:
        for row in bench.llama_cpp(llama_quantize, kind or list(KINDS)):
            rows.append(row)
            print(row, flush=True)
    rows.sort(key=lambda row: row.bytes)
    best = [row for row in rows if all(row.quality.kl_mean < o.quality.kl_mean for o in rows if o.bytes < row.bytes)]
    print("best for their bytes:", ", ".join(f"{row.engine} {row.name}" for row in best))


if __name__ == "__main__":
    typer.run(main)
