from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx_ir as ir
import pytest
import torch
import transformers
from safetensors.torch import load_file

from graphopt.errors import InputError, MissingDependencyError
from graphopt.graph.onnx_file import load as load_onnx
from graphopt.graph.weights import Cast, Inline, WeightTensor
from graphopt.graph.weights.data_file import save_model
from graphopt.models import checkpoint, loading
from graphopt.models.checkpoint_tensors import Parameter
from graphopt.models.export import export
from graphopt.models.loading import LoadedModel, load, outline
from tests.families import HIDDEN, VOCABULARY


def notes_of(model: LoadedModel) -> str:
    return " ".join(map(str, model.notes))


def test_safetensors_are_not_read(llama_folder: Path) -> None:
    model = load(str(llama_folder))
    assert model.notes == []
    assert all(isinstance(weight, Cast) for weight in model.weights.values())
    tensors = load_file(llama_folder / "model.safetensors")
    for name in ("model.layers.1.mlp.up_proj.weight", "lm_head.weight"):
        expected = tensors.get(name, tensors["model.embed_tokens.weight"]).float().numpy()
        assert np.array_equal(model.weights[name].numpy(), expected)


def test_other_files_are_loaded_into_memory_and_it_says_so(llama_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(llama_folder, tmp_path / "model")
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model.bin")
    model = load(str(folder))
    assert "the whole model was loaded into memory: its weights are not in safetensors files alone" in notes_of(model)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert isinstance(model.weights[name], Inline)
    assert np.array_equal(model.weights[name].numpy(), state[name].float().numpy())
    assert model.weights["lm_head.weight"] is model.weights["model.embed_tokens.weight"]


def test_weights_that_transformers_computes_with_are_loaded_into_memory(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import core_model_loading

    def halve(tensor: torch.Tensor, device: object = None, dtype: object = None) -> torch.Tensor:
        return torch.mul(tensor[...].to(torch.float32), 0.5)

    monkeypatch.setattr(core_model_loading, "_materialize_copy", halve)
    model = load(str(llama_folder))
    assert "transformers does more to its weights than to move and widen them" in notes_of(model)
    gain = load_file(llama_folder / "model.safetensors")["model.norm.weight"].float().numpy()
    assert np.array_equal(model.weights["model.norm.weight"].numpy(), gain / 2)


@pytest.mark.parametrize("family", ["mixtral", "bert"])
def test_an_outline_needs_a_configuration_only(family: str, make_folder: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copy(make_folder(family) / "config.json", tmp_path)
    sketch, whole = outline(str(tmp_path)), load(str(make_folder(family)))
    assert "its weights were not asked for" in notes_of(sketch)
    assert {name: (weight.shape, weight.dtype) for name, weight in sketch.weights.items()} == {
        name: (weight.shape, weight.dtype) for name, weight in whole.weights.items()
    }
    assert all(isinstance(weight, Parameter) for weight in sketch.weights.values())
    with pytest.raises(InputError, match="there are no weights"):
        sketch.runnable()


def test_a_text_part_that_is_saved_alone_is_of_the_class_that_it_names(tmp_path: Path) -> None:
    config = transformers.MllamaConfig(
        text_config={
            "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 96, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "cross_attention_layers": [1],
            "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
        }
    )  # fmt: skip
    model = transformers.MllamaForCausalLM(config.text_config).eval()
    model.save_pretrained(tmp_path)
    ids = torch.arange(7)[None]
    text_model = load(str(tmp_path))
    assert text_model.notes == []
    with torch.no_grad():
        assert torch.equal(text_model.runnable()(ids).logits, model(ids).logits)


def test_a_package_that_transformers_lacks_is_named(llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ImportError("\nTimmWrapperModel requires the timm library\n`pip install timm`. Restart.\n")

    broken = SimpleNamespace(from_pretrained=fail, _from_config=fail)
    for module in (checkpoint, loading):
        monkeypatch.setattr(module, "class_of", lambda _: broken)
    for open_model in (load, outline):
        with pytest.raises(MissingDependencyError, match=r"requires the timm library\): pip install timm$"):
            open_model(str(llama_folder))


def test_only_a_configuration_is_exported_without_weights(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="only a Hugging Face model is exported without weights"):
        export(tmp_path / "model.gguf", tmp_path / "out", weights=False)


def test_a_model_without_weights_is_written_and_not_opened(tmp_path: Path) -> None:
    w = ir.val("w", const_value=WeightTensor(Parameter("w", ir.DataType.FLOAT, (3, 2))))
    unit = ir.val("one", const_value=ir.tensor(np.float32(1)))
    x = ir.val("x", ir.DataType.FLOAT, [1, 3])
    nodes = [ir.node("MatMul", [x, w])]
    nodes.append(ir.node("Add", [nodes[0].outputs[0], unit]))
    nodes[1].outputs[0].name = "y"
    graph = ir.Graph([x], nodes[1].outputs, nodes=nodes, initializers=[w, unit], opset_imports={"": 23})
    save_model(ir.Model(graph, ir_version=10), tmp_path / "model.onnx", "model.onnx.data", weights=False)
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]
    initializers = ir.load(tmp_path / "model.onnx").graph.initializers
    assert initializers["one"].const_value.numpy() == 1
    assert (initializers["w"].const_value.nbytes, initializers["w"].const_value.location) == (24, "model.onnx.data")
    with pytest.raises(InputError, match=r"external data is missing.*tensor=w"):
        load_onnx(tmp_path / "model.onnx")


def test_a_checkpoint_with_an_adapter_is_loaded_by_transformers(llama_folder: Path, tmp_path: Path) -> None:
    from graphopt.models.checkpoint import load_config
    from graphopt.models.loading import _tensors_of

    folder = shutil.copytree(llama_folder, tmp_path / "model")
    assert _tensors_of(load_config(str(folder)), str(folder)) is not None
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    assert _tensors_of(load_config(str(folder)), str(folder)) is None
