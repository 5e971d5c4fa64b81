"""What the benchmark of quality hands to other quantizers, and takes back."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import onnx
import pytest

from graphopt.artifact import artifact
from graphopt.compile.pipeline import optimize
from graphopt.models.gguf.checkpoint import outline_gguf
from graphopt.passes.lift.canonicalize import Canonicalize
from graphopt.passes.recipe import Recipe
from graphopt.quality.compare import compare
from graphopt.quantization.gguf.file import open_gguf
from graphopt.tasks import task_of
from tests import ggufs
from tools.bench.parts.gguf_file import write_gguf
from tools.bench.peers import gguf as llama_cpp
from tools.bench.peers import nbits, olive
from tools.studies.real.dither import add_noise


def test_floats_are_the_file_with_other_numbers(tmp_path: Path) -> None:
    ggufs.write_llama(ggufs.llama(), tmp_path / "codes.gguf", {"token_embd": "Q8_0", "attn_q": "Q4_0"})
    file = add_noise(open_gguf(tmp_path / "codes.gguf"), 0)
    llama_cpp.write_floats(file, tmp_path / "floats.gguf")
    floats = open_gguf(tmp_path / "floats.gguf")
    assert floats.metadata == file.metadata
    assert list(floats.tensors) == list(file.tensors)
    for name, tensor in floats.tensors.items():
        assert np.array_equal(tensor.numpy(), file.tensors[name].numpy())
    assert llama_cpp.kinds(floats) == "F32"
    assert llama_cpp.kinds(open_gguf(tmp_path / "codes.gguf")).split(", ")[0] == "F32"
    assert llama_cpp.weight_bytes(floats) == sum(4 * np.prod(tensor.shape) for tensor in floats.tensors.values())


def test_a_checkpoint_is_written_as_the_model_that_it_is(tmp_path: Path) -> None:
    model = ggufs.llama().half()
    model.save_pretrained(tmp_path / "checkpoint")
    write_gguf(tmp_path / "checkpoint", tmp_path / "written.gguf")
    _, weights = outline_gguf(tmp_path / "written.gguf")
    state = model.state_dict()
    assert weights.keys() >= {"model.layers.1.self_attn.q_proj.weight", "model.layers.1.self_attn.k_proj.weight"}
    for name, weight in weights.items():
        assert np.array_equal(weight.numpy(), state[name].numpy().astype(np.float32))


def test_an_importance_matrix_lies_as_llama_cpp_reads_it(tmp_path: Path) -> None:
    squares = {"blk.0.attn_q.weight": np.arange(3.0), "blk.0.ffn_down.weight": np.ones(5)}
    llama_cpp.write_importance(squares, tmp_path / "importance.dat")
    data = (tmp_path / "importance.dat").read_bytes()
    (count,) = struct.unpack_from("<i", data)
    offset, importances = 4, {}
    for _ in range(count):
        (length,) = struct.unpack_from("<i", data, offset)
        name = data[offset + 4 : offset + 4 + length].decode()
        calls, size = struct.unpack_from("<ii", data, offset + 4 + length)
        begin = offset + 12 + length
        importances[name] = np.frombuffer(data, "<f4", size, begin) / calls
        offset = begin + 4 * size
    assert offset == len(data)
    assert importances.keys() == squares.keys()
    assert all(np.array_equal(importances[name], squares[name]) for name in squares)


def test_onnxruntime_quantizes_what_graphopt_starts_from(llama_artifact: Path, tmp_path: Path) -> None:
    optimize(llama_artifact, Recipe(name="canonical", steps=(Canonicalize(),)), tmp_path / "plain")
    size = nbits.quantize(tmp_path / "plain", "RTN", 32, tmp_path / "made")
    floats = (tmp_path / "plain" / "model.onnx.data").stat().st_size
    # 4 bits, a float32 scale and half a byte for 32 weights, where there were 32; norms stay
    assert size < 0.2 * floats
    assert nbits.quantize(tmp_path / "plain", "RTN", 32, tmp_path / "made") == size  # nothing is left of the last run
    quality = compare(llama_artifact, tmp_path / "made", ["def add(a, b):\n    return a + b\n" * 9], tokens=40)
    # 0.07 seen; nothing is lost where nothing was rounded, and broken codes lose more than 1
    assert 0 < quality.kl_mean < 0.2


def test_outputs_get_their_names_again() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 23]>
        agraph (float[2] x) => (float[2] logits_Q4, float[2] present) {
            logits_Q4 = Neg(x)
            present = Abs(logits_Q4)
        }"""
    )
    new_model = olive.rename_outputs(model, ["logits", "present"])
    assert [value.name for value in new_model.graph.output] == ["logits", "present"]
    assert [(*node.input, *node.output) for node in new_model.graph.node] == [("x", "logits"), ("logits", "present")]


def test_onnxruntimes_gptq_calibrates_on_what_it_is_fed(llama_artifact: Path, tmp_path: Path) -> None:
    optimize(llama_artifact, Recipe(name="canonical", steps=(Canonicalize(),)), tmp_path / "plain")
    graph = artifact.read(tmp_path / "plain").model.graph
    texts = [np.random.default_rng(seed).integers(0, 40, (1, 64)) for seed in range(2)]
    feeds = [dict(task_of(graph).text_feeds(graph, text)) for text in texts]
    sizes = {
        name: nbits.quantize(tmp_path / "plain", name, 16, tmp_path / name, feeds if name == "GPTQ" else ())
        for name in ("RTN", "GPTQ")
    }
    assert sizes["RTN"] == pytest.approx(sizes["GPTQ"], rel=0.01)
    codes = [(tmp_path / name / "model.onnx.data").read_bytes() for name in sizes]
    assert codes[0] != codes[1]
    quality = compare(llama_artifact, tmp_path / "GPTQ", ["def add(a, b):\n    return a + b\n" * 9], tokens=40)
    assert 0 < quality.kl_mean < 0.2  # as round to nearest
