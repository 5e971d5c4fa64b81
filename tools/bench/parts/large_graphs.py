"""Graphs of models too large to compile here: what `graphopt optimize` writes, and onnxruntime-genai's builder too.

Only graphs are made; the files of weights that they name are not. Where these are needed,
:func:`tools.bench.parts.drawn_weights.fill_external_data` writes them.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import onnx
from onnx_ir.passes.common import NameFixPass

from graphopt.artifact import artifact as artifacts
from graphopt.artifact.artifact import DATA, MODEL
from graphopt.artifact.genai import GENAI_CONFIG
from graphopt.compile.compilation import Compilation
from graphopt.compile.pipeline import chosen_recipe
from graphopt.graph.weights.data_file import INLINE
from graphopt.graph.weights.tensor import WeightTensor, tensor_in_memory
from graphopt.models.export import shipped_models
from graphopt.passes.codes.quantize_weights import QuantizeWeights
from graphopt.passes.recipe import Recipe, load_recipe
from tools.bench.parts.drawn_weights import draw_weights
from tools.bench.parts.engine import optional
from tools.bench.parts.random_checkpoint import make_artifact

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import onnx_ir as ir

Caches = Literal["growing", "pages"]
Precision = Literal["int4", "fp16"]

BUILT_LAYERS = 2
"""Layers of a checkpoint that the peer's builder reads; the second stands for all further ones."""

_PAGE = 1 << 12  # bytes: offsets of tensors are multiples of it

_LAYER = re.compile(r"(layers|past_key_values|present)\.(\d+)(?=[./_])")


def write_graph(
    config: Mapping[str, Any],
    recipe: str | Path | Recipe,
    output: Path,
    *,
    caches: Caches | None = None,
    target: Literal["ort-cpu", "ort-cuda"] = "ort-cuda",
    float16: bool = True,
    last_logits: int = 1,
) -> None:
    """Write the graph by ``graphopt optimize`` of all layers, with logits of the last positions.

    Every pass of the recipe runs on random weights. Codes and scales are random too: rounding billions of numbers would
    take too long.

    Args:
        config: what ``config.json`` says of the model.
        recipe: a preset, a file or a recipe.
        output: the folder of the artifact.
        caches: the cache, in float16; ``None`` for what the recipe says.
        target: as for ``optimize``.
        float16: likewise.
        last_logits: likewise; how many.

    Raises:
        InputError: a pass cannot work on the model, or it is not known what suits a weight.
    """
    with tempfile.TemporaryDirectory(prefix="graphopt-bench-") as temporary:
        source, work = Path(temporary, "source"), Path(temporary, "work")
        source.mkdir()
        work.mkdir()
        artifact = make_artifact(dict(config), source)
        draw_weights(artifact.model)
        full_recipe = chosen_recipe(_with_caches(load_recipe(recipe), caches), None, last_logits, float16)
        compilation = Compilation(artifact, full_recipe, target, work=work, run=False)
        for run in compilation.apply(compilation.passes):
            if run.report.name == QuantizeWeights.name:
                draw_weights(compilation.model)
        NameFixPass()(compilation.model)
        _evaluate_constants(compilation.model)
        result = compilation.artifact(compilation.recipe, [], None)
        artifacts.write(result, output, overwrite=True, weights=False)


def _with_caches(recipe: Recipe, caches: Caches | None) -> Recipe:
    if caches is None:
        return recipe
    recipe = without_caches(recipe)
    if caches == "pages":
        return recipe.adding("quantize_kv").setting("quantize_kv", storage="float16")
    return recipe.adding("lower").setting("lower", caches="growing")


def without_caches(recipe: Recipe) -> Recipe:
    """Return a recipe that leaves caches as they are."""
    return recipe.model_copy(update={"steps": tuple(step for step in recipe.steps if step.phase() != "cache")})


def _evaluate_constants(model: ir.Model) -> None:
    """Evaluate the tensors that are stored in the model file itself: shapes and the like, no weights."""
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if isinstance(tensor, WeightTensor) and tensor.nbytes <= INLINE:
            value.const_value = tensor_in_memory(tensor.expression, value.name)


def write_peer_graph(
    config: Mapping[str, Any],
    precision: Precision,
    output: Path,
    *,
    block: int = 128,
    device: str = "cuda",
    options: Sequence[str] | None = None,
) -> None:
    """Write the graph that onnxruntime-genai's model builder makes, with logits of the last position.

    The builder holds a whole model in memory, so it is given one of :data:`BUILT_LAYERS` layers; the nodes of the last
    are copied for all further ones.

    Args:
        config: what ``config.json`` says of the model.
        precision: ``int4`` is ``MatMulNBits``, ``fp16`` plain products.
        output: the folder.
        block: numbers that share a scale.
        device: the builder's name for what it builds for.
        options: more of its extra options.

    Raises:
        UnavailableError: onnxruntime-genai is not installed, or its builder fails.
    """
    from tools.bench.parts.models import _run

    optional("onnxruntime_genai")
    layers = config["num_hidden_layers"]
    with tempfile.TemporaryDirectory(prefix="graphopt-bench-") as temporary:
        checkpoint, peer_folder = Path(temporary, "checkpoint"), Path(temporary, "built")
        _write_checkpoint({**config, "num_hidden_layers": min(layers, BUILT_LAYERS)}, checkpoint)
        extra = [*(options or []), *([f"block_size={block}"] if precision == "int4" else [])]
        command = [
            sys.executable,
            "-m",
            "onnxruntime_genai.models.builder",
            "-i",
            str(checkpoint),
            "-o",
            str(peer_folder),
        ]
        command += ["-p", precision, "-e", device, "-c", str(Path(temporary, "cache"))]
        _run([*command, "--extra_options", *extra, "prune_lm_head=true", "hf_token=false"])
        model = onnx.load(peer_folder / MODEL, load_external_data=False)
        output.mkdir(parents=True, exist_ok=True)
        (output / MODEL).write_bytes(with_layers(model, layers).SerializeToString())
        shutil.copy(peer_folder / GENAI_CONFIG, output)


def _write_checkpoint(config: Mapping[str, Any], folder: Path) -> None:
    """Write a checkpoint of random weights in bfloat16, with the shipped model's tokenizer."""
    torch, transformers = optional("torch"), optional("transformers")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**config), dtype=torch.bfloat16
        )
    model.to_empty(device="cpu")
    for name, parameter in model.named_parameters():
        numbers = torch.ones(1) if "norm" in name else torch.randn((1 << 20) + 64) * 0.02
        copies = -(-parameter.numel() // len(numbers))
        parameter.data = numbers.to(parameter.dtype).repeat(copies)[: parameter.numel()].reshape(parameter.shape)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(shipped_models()["stdlib_lm"] / name, folder)


def with_layers(model: onnx.ModelProto, layers: int) -> onnx.ModelProto:
    """Return a graph of the builder with as many layers: copies of its last one, with other numbers in all names.

    Names hold ``layers.N``, ``past_key_values.N`` or ``present.N``; nodes after the last layer have the next number, or
    none. External weights get new offsets, in one file.

    Raises:
        ValueError: it has more layers.
    """
    result = onnx.ModelProto()
    result.CopyFrom(model)
    graph = result.graph
    last = max(number for value in graph.input for number in _numbers(value.name))
    new_layers = layers - 1 - last
    if new_layers < 0:
        raise ValueError(f"the graph has {last + 1} layers, and {layers} were asked for")

    def own_number(message: Any) -> int:
        """Return the number in what a node makes, or in the name of a value or weight; -1 without one."""
        names = message.output if isinstance(message, onnx.NodeProto) else [message.name]
        return max((number for name in names for number in _numbers(name)), default=-1)

    for field in ("input", "output", "initializer"):
        messages = getattr(graph, field)
        copies = []
        for message in messages:
            number = own_number(message)
            shifts = range(new_layers + 1) if number == last else [new_layers if number > last else 0]
            copies += [_shift_layers(message, shift) for shift in shifts]
        del messages[:]
        messages.extend(copies)
    nodes = list(graph.node)
    numbers = [own_number(node) for node in nodes]
    begin, end = numbers.index(last), len(numbers) - numbers[::-1].index(last)
    del graph.node[:], graph.value_info[:]
    graph.node.extend(nodes[:begin])
    graph.node.extend(_shift_layers(node, shift) for shift in range(new_layers + 1) for node in nodes[begin:end])
    graph.node.extend(_shift_layers(node, new_layers) for node in nodes[end:])
    _place_weights(graph)
    return result


def _numbers(name: str) -> list[int]:
    return [int(number) for _, number in _LAYER.findall(name)]


def _shift_layers(message: Any, shift: int) -> Any:
    """Return a copy of a node, a value or a weight in which all numbers of layers are ``shift`` more."""

    def shift_name(name: str) -> str:
        return _LAYER.sub(lambda match: f"{match[1]}.{int(match[2]) + shift}", name)

    copy = type(message)()
    copy.CopyFrom(message)
    copy.name = shift_name(message.name)
    if isinstance(message, onnx.NodeProto):
        del copy.input[:], copy.output[:]
        copy.input.extend(map(shift_name, message.input))
        copy.output.extend(map(shift_name, message.output))
    return copy


def _place_weights(graph: onnx.GraphProto) -> None:
    """Give all external weights offsets in one file, one after the other."""
    end = 0
    for tensor in graph.initializer:
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            continue
        length = next(int(entry.value) for entry in tensor.external_data if entry.key == "length")
        del tensor.external_data[:]
        for key, value in (("location", DATA), ("offset", end), ("length", length)):
            tensor.external_data.add(key=key, value=str(value))
        end += -(-length // _PAGE) * _PAGE
