from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch

from graphopt.artifact import artifact
from graphopt.graph.weights import expression_of
from graphopt.models.gguf.checkpoint import empty_model, expressions_of
from graphopt.quantization.gguf.blocks import Ggml
from graphopt.quantization.gguf.file import GgufFile, open_gguf
from tests import ggufs
from tools.studies.real.dither import add_noise, dither, steps_of
from tools.studies.real.models import location, missing


@pytest.fixture
def file(tmp_path: Path) -> GgufFile:
    path = tmp_path / "llama.gguf"
    ggufs.write_llama(ggufs.llama(), path, {"token_embd": "Q8_0", "attn_q": "Q4_0", "attn_k": "Q4_1"})
    return open_gguf(path)


def test_noise_is_of_half_a_step_on_each_side(file: GgufFile) -> None:
    first, same_seed, other_seed = (add_noise(file, seed).tensors for seed in (0, 0, 1))
    for name, tensor in file.tensors.items():
        assert isinstance(tensor, Ggml)
        before, after = tensor.numpy(), first[name].numpy()
        if tensor.kind == "F32":
            assert first[name] is tensor
            continue
        steps = (after - before) / steps_of(tensor)
        # float32 sums of numbers of up to eight steps
        assert np.abs(steps).max() <= 0.5 + 1e-4
        assert np.abs(steps).max() > 0.49
        assert abs(steps.mean()) < 4 * steps.std() / np.sqrt(steps.size)
        assert steps.std() == pytest.approx(12**-0.5, rel=0.02)
        assert np.array_equal(same_seed[name].numpy(), after)
        assert not np.array_equal(other_seed[name].numpy(), after)


def test_a_step_is_the_distance_of_neighbouring_codes(file: GgufFile) -> None:
    for name in ("blk.0.attn_q.weight", "blk.1.attn_k.weight", "token_embd.weight"):
        tensor = file.tensors[name]
        assert isinstance(tensor, Ggml)
        numbers = tensor.numpy().reshape(-1, 32)
        steps = steps_of(tensor).reshape(-1, 32)[:, :1]
        # all numbers of a block lie whole steps apart, and some are one step apart
        distances = (numbers - numbers[:, :1]) / np.where(steps == 0, 1, steps)
        assert np.abs(distances - distances.round()).max() < 1e-3
        gaps = np.diff(np.sort(distances, axis=1), axis=1)
        assert gaps[gaps > 0.5].min() == pytest.approx(1, abs=1e-3)


def test_an_artifact_takes_the_noise_in_both_orientations(file: GgufFile, tmp_path: Path) -> None:
    weights = expressions_of(file, empty_model(file))
    query, table = weights["model.layers.0.self_attn.q_proj.weight"], weights["model.embed_tokens.weight"]
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 23}, name="g")
    # as products and lookups keep them
    arrays = {"model.layers.0.self_attn.q_proj.weight": query.numpy().T, "model.embed_tokens.weight": table.numpy()}
    for name, array in arrays.items():
        graph.initializers[name] = ir.val(name, const_value=ir.tensor(np.ascontiguousarray(array), name=name))
    ids = ir.val("input_ids", ir.DataType.INT64, ["batch", "length"])
    looked_up = ir.node("Gather", [graph.initializers["model.embed_tokens.weight"], ids])
    product = ir.node("MatMul", [looked_up.outputs[0], graph.initializers["model.layers.0.self_attn.q_proj.weight"]])
    product.outputs[0].name, product.outputs[0].dtype = "last_hidden_state", ir.DataType.FLOAT
    product.outputs[0].shape = ir.Shape(["batch", "length", ggufs.WIDTH])
    graph.inputs.append(ids)
    graph.extend([looked_up, product])
    graph.outputs.append(product.outputs[0])
    ir.save(ir.Model(graph, ir_version=10), tmp_path / "model.onnx")
    assert dither(tmp_path, file.path, tmp_path / "out") == 2
    after = artifact.read(tmp_path / "out").model.graph.initializers
    expected = expressions_of(add_noise(file, 0), empty_model(file))
    for name, array in arrays.items():
        matrix = expected[name].numpy()
        result = expression_of(after[name].const_value).numpy()
        assert np.array_equal(result, matrix if array.shape == matrix.shape and "embed" in name else matrix.T)
        assert not np.array_equal(result, array)
    with pytest.raises(ValueError, match=r"is not what .*llama.gguf holds"):
        dither(tmp_path / "out", file.path, tmp_path / "again")


@pytest.mark.real
def test_the_real_file_is_decoded_as_transformers_decodes_it() -> None:
    reason = missing("smollm2")
    if reason is not None:
        pytest.skip(reason)
    file = open_gguf(location("smollm2"))
    model = empty_model(file)
    assert (type(model).__name__, len(file.tensors)) == ("LlamaForCausalLM", 272)
    weights = expressions_of(file, model)
    assert sum(int(np.prod(weight.shape)) for weight in weights.values()) == 134_515_008
    for name, tensor in list(file.tensors.items())[:8]:
        assert isinstance(tensor, Ggml)
        if tensor.kind != "F32":
            block = np.ascontiguousarray(tensor.stored_bytes()[:4])
            expected = ggufs.decoded_by_transformers(block, tensor.kind)
            assert np.array_equal(tensor.evaluate((slice(0, 4), slice(0, tensor.shape[1]))), expected), name
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
