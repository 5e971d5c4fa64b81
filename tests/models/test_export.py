from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from graphopt.artifact import artifact
from graphopt.artifact.artifact import DATA, MODEL
from graphopt.artifact.hf_config import facts_of
from graphopt.artifact.manifest import read_manifest
from graphopt.errors import InputError, MissingDependencyError, VerificationError
from graphopt.models import export as export_module
from graphopt.models.agreement import MAIN, check_agreement
from graphopt.models.export import export, shipped_models
from graphopt.models.trace import confirm_length, trace
from graphopt.ort.session import open_session
from graphopt.tasks.causal_lm.interface import Interface
from tests.checkpoints import HUB
from tests.conftest import FAMILIES
from tests.families import HIDDEN, VOCABULARY
from tools.studies.all_families import families, small

# The bound, relative to the largest logit. Float32 summed in another order through two layers moves these
# logits by 1e-7 to 2e-6 (seen); one wrong mask, position or rotary angle moves them by more than 1e-2.
TOLERANCE = 1e-4
LENGTH = 20
# Ways to feed 20 tokens: at once, a prompt and single steps, two pieces, and one by one from an empty cache.
WAYS = {
    "at once": [20],
    "prompt and steps": [16, 1, 1, 1, 1],
    "two pieces": [9, 11],
    "one by one": [1] * 20,
}


@pytest.fixture
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield the path of an output, and confirm afterwards that neither it nor any temporary file is left."""
    scratch, outputs = tmp_path / "scratch", tmp_path / "outputs"
    scratch.mkdir()
    outputs.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    yield outputs / "artifact"
    assert list(outputs.iterdir()) == []
    assert list(scratch.iterdir()) == []


def torch_logits(folder: Path, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return what transformers computes for all tokens in one forward, without a cache."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    positions = np.maximum(mask.cumsum(-1) - 1, 0)
    with torch.no_grad():
        output = model(
            input_ids=torch.tensor(ids), attention_mask=torch.tensor(mask), position_ids=torch.tensor(positions)
        )
    logits: np.ndarray = output.logits.numpy()
    return logits


def graph_logits(folder: Path, ids: np.ndarray, mask: np.ndarray, pieces: list[int]) -> np.ndarray:
    """Return what onnxruntime computes for the same tokens, fed in ``pieces``."""
    session = open_session(folder / MODEL)
    names = [output.name for output in session.get_outputs()]
    heads, size = (next(i for i in session.get_inputs() if i.name.endswith(".key")).shape[axis] for axis in (1, 3))
    past = {
        name.replace("present", "past_key_values"): np.zeros((len(ids), heads, 0, size), np.float32)
        for name in names
        if name != "logits"
    }
    positions = np.maximum(mask.cumsum(-1) - 1, 0)
    rows, start = [], 0
    for length in pieces:
        end = start + length
        feeds = {
            "input_ids": ids[:, start:end],
            "attention_mask": mask[:, :end],
            "position_ids": positions[:, start:end],
        }
        outputs = dict(zip(names, session.run(names, feeds | past), strict=True))
        rows.append(outputs.pop("logits"))
        past = {name.replace("present", "past_key_values"): value for name, value in outputs.items()}
        assert all(value.shape == (len(ids), heads, end, size) for value in past.values())
        start = end
    return np.concatenate(rows, axis=1)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(
    family: str, make_folder: Callable[[str], Path], make_artifact: Callable[[str], Path]
) -> None:
    random = np.random.default_rng(1)
    for padding in ([0], [0, 3, 9]):
        ids = random.integers(0, VOCABULARY, (len(padding), LENGTH))
        mask = (np.arange(LENGTH) >= np.array(padding)[:, None]).astype(np.int64)
        expected = torch_logits(make_folder(family), ids, mask)
        real = mask.astype(bool)
        largest = np.abs(expected[real]).max()
        # Logits of order 1: were they tiny, an absolute error of rounding would pass for agreement.
        assert 0.5 < largest < 100
        for way, pieces in WAYS.items():
            logits = graph_logits(make_artifact(family), ids, mask, pieces)
            assert logits.shape == expected.shape
            assert np.abs(logits - expected)[real].max() <= TOLERANCE * largest, f"{way}, padding {padding}"


def test_interface(llama_artifact: Path) -> None:
    graph = ir.load(llama_artifact / MODEL).graph
    caches = [f"past_key_values.{layer}.{part}" for layer in range(2) for part in ("key", "value")]
    assert [value.name for value in graph.inputs] == ["input_ids", "attention_mask", "position_ids", *caches]
    shapes = {value.name: str(value.shape) for value in (*graph.inputs, *graph.outputs)}
    assert shapes["input_ids"] == shapes["position_ids"] == "[batch,length]"
    assert shapes["attention_mask"] == "[batch,past + length]"
    assert shapes["past_key_values.1.value"] == "[batch,2,past,16]"
    assert shapes["present.1.value"] == "[batch,2,past + length,16]"
    assert shapes["logits"] == f"[batch,length,{VOCABULARY}]"
    interface = Interface.of_graph(graph)
    assert interface.past == tuple(caches)
    assert interface == Interface.of_session(open_session(llama_artifact / MODEL))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_has_the_name_and_size_of_its_parameter(
    family: str, make_folder: Callable[[str], Path], make_artifact: Callable[[str], Path]
) -> None:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(make_folder(family)).float()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    graph = ir.load(make_artifact(family) / MODEL).graph
    for name, value in graph.initializers.items():
        if value.dtype is not None and value.dtype.is_floating_point() and value.const_value.size >= 16:
            if "inv_freq" in name:
                continue
            assert sorted(value.shape) == sorted(parameters[name].shape), name
            array, expected = value.const_value.numpy(), parameters[name].detach().numpy()
            if family == "gemma3" and "norm" in name:
                expected = 1 + expected
            # Matrices may be stored transposed.
            assert np.array_equal(array, expected) or np.array_equal(array.T, expected), name


def test_nodes_are_named_after_their_modules(llama_artifact: Path) -> None:
    graph = ir.load(llama_artifact / MODEL).graph
    names = [node.name for node in graph.all_nodes()]
    assert len(set(names)) == len(names)
    nodes = {node.name: node for node in graph.all_nodes()}
    for module in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.down_proj"):
        node = nodes[f"model.layers.1.{module}.MatMul"]
        assert node.inputs[1].name == f"model.layers.1.{module}.weight"
        assert node.outputs[0].name == f"model.layers.1.{module}.MatMul.output"
    assert nodes["model.embed_tokens.Gather"].inputs[0].name == "model.embed_tokens.weight"


def test_exporters_notes_are_stripped(llama_artifact: Path) -> None:
    graph = ir.load(llama_artifact / MODEL).graph
    keys = {key for node in graph.all_nodes() for key in node.metadata_props}
    assert keys == {"pkg.torch.onnx.name_scopes"}
    # About 400 bytes a node (names, scope, shapes); stack traces alone take five times that.
    assert (llama_artifact / MODEL).stat().st_size < 600 * len(list(graph.all_nodes()))


def test_manifest_and_companions(llama_folder: Path, llama_artifact: Path) -> None:
    manifest = read_manifest(llama_artifact)
    assert manifest.source.kind == "transformers"
    assert manifest.model.architecture == "LlamaForCausalLM"
    assert (manifest.model.max_positions, manifest.model.bos_token_id, manifest.model.eos_token_ids) == (128, 0, [0])
    assert manifest.notes == []
    (check,) = manifest.checks
    assert check.status == "measured"
    assert check.figures["largest_change"] <= TOLERANCE
    assert {"graphopt", "onnx", "onnx-ir", "onnxruntime", "torch", "transformers"} <= manifest.versions.keys()
    # Layers of query, key, value, output and three MLP matrices, two gains; the embedding, the last gain, 8 angles.
    layer = HIDDEN * (HIDDEN + 32 + 32 + HIDDEN + 3 * 160 + 2)
    assert manifest.weights is not None
    assert manifest.weights.parameters == 2 * layer + VOCABULARY * HIDDEN + HIDDEN + 8
    assert manifest.weights.bytes == 4 * manifest.weights.parameters
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"):
        assert (llama_artifact / name).read_bytes() == (llama_folder / name).read_bytes()
        assert name in manifest.files
    artifact.verify_files(llama_artifact)


def test_a_folder_without_tokenizer_says_so(make_artifact: Callable[[str], Path]) -> None:
    folder = make_artifact("qwen2")
    assert not (folder / "tokenizer.json").exists()
    assert list(map(str, read_manifest(folder).notes)) == ["no tokenizer was carried along: the folder has none"]


def test_hub_id(hub_export: Path, make_folder: Callable[[str], Path]) -> None:
    """A model in the hub's cache on disk is exported without a word."""
    manifest = read_manifest(hub_export / "artifact")
    assert (hub_export / "printed").read_text() == ""
    stages = (hub_export / "stages").read_text().splitlines()
    assert stages[0] == "asking the Hugging Face hub for the model"
    assert stages[-1] == "writing the artifact"
    assert (manifest.source.kind, manifest.source.name) == ("transformers", "somebody/tiny")
    assert manifest.model == facts_of(make_folder(HUB), "causal_lm")
    assert manifest.notes == []
    (check,) = manifest.checks
    assert check.status == "measured"
    assert (hub_export / "artifact" / "tokenizer.json").is_file()
    artifact.verify_files(hub_export / "artifact")


def with_configuration(folder: Path) -> Any:
    """What stands for the model of a checkpoint where its configuration alone is looked at."""
    import transformers

    return SimpleNamespace(config=transformers.AutoConfig.from_pretrained(folder))


def test_tokenizer_of_an_older_kind_is_converted(
    llama_folder: Path, make_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    from tokenizers import Tokenizer

    folder, output = shutil.copytree(make_folder("gpt2"), tmp_path / "model"), tmp_path / "made"
    tokenizer = Tokenizer.from_file(str(llama_folder / "tokenizer.json"))
    tokenizer.model.save(str(folder))
    assert (folder / "vocab.json").exists()
    output.mkdir()
    companions, notes = export_module._companions(str(folder), with_configuration(folder), output)
    assert notes == []
    assert companions["config.json"] == folder / "config.json"
    new_tokenizer = Tokenizer.from_file(str(companions["tokenizer.json"]))
    text = "def main() -> None:"
    assert new_tokenizer.encode(text).ids == tokenizer.encode(text, add_special_tokens=False).ids


def test_tokenizer_that_cannot_be_read_says_so(make_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folder, output = shutil.copytree(make_folder("gpt2"), tmp_path / "model"), tmp_path / "made"
    (folder / "vocab.json").write_text("{")
    (folder / "merges.txt").write_text("")
    output.mkdir()
    companions, (note,) = export_module._companions(str(folder), with_configuration(folder), output)
    assert "tokenizer.json" not in companions
    assert "no tokenizer was carried along: transformers cannot load it" in str(note)


# ---- models that are not taken


def refusal(model: str | Path, output: Path, **options: Any) -> str:
    with pytest.raises(InputError) as caught:
        export(model, output, **options)
    return str(caught.value)


@pytest.mark.parametrize("model", ["./nowhere", "/nowhere/at/all", "a/b/c", Path("nowhere")])
def test_missing_path(model: str | Path, clean: Path) -> None:
    assert "there is no model here" in refusal(model, clean)


def test_unknown_hub_id(clean: Path) -> None:
    message = refusal("nobody/nothing", clean)
    assert "nobody/nothing" in message
    assert "no file, folder or shipped model has this name, and the Hugging Face hub gave none" in message


def test_file_of_another_kind(clean: Path, tmp_path: Path) -> None:
    file = tmp_path / "weights.bin"
    file.write_bytes(b"x")
    assert "the file is no ONNX model" in refusal(file, clean)


def test_folder_without_configuration(clean: Path, tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    assert "no model configuration can be read" in refusal(folder, clean)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "t5", "architectures": ["T5ForSequenceClassification"], "is_encoder_decoder": True},
        {"model_type": "bert", "architectures": ["BertForMultipleChoice"]},
        {"model_type": "vit", "architectures": ["ViTForMaskedImageModeling"]},
        {"model_type": "llama", "architectures": ["LlamaForNothing"]},
    ],
)
def test_a_kind_of_model_that_is_not_known(config: dict[str, Any], clean: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    message = refusal(folder, clean)
    assert f"{config['architectures'][0]} is none of the kinds of models" in message


def test_images_that_no_graph_reads_are_refused_as_such(clean: Path, tmp_path: Path) -> None:
    config = {"model_type": "mllama", "architectures": ["MllamaForConditionalGeneration"]}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    message = refusal(tmp_path / "model", clean)
    assert (
        "MllamaForConditionalGeneration reads images beside a text in a way that graphopt makes no graph of" in message
    )
    assert message.endswith("as a checkpoint of MllamaForCausalLM")


def test_quantized_checkpoint(llama_folder: Path, clean: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(llama_folder, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "gptq", "bits": 4}})
    )
    assert "the checkpoint says that it is quantized, but has no tensors of gptq" in refusal(folder, clean)


def test_bidirectional_model_has_no_cache(clean: Path, tmp_path: Path) -> None:
    import transformers

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=32, max_position_embeddings=32, **sizes)
    transformers.BertLMHeadModel(config).save_pretrained(tmp_path / "model")
    assert "came out without a cache or a state" in refusal(tmp_path / "model", clean)


def test_state_that_is_no_cache() -> None:
    import transformers

    # keys of blocks, and of the tokens that fill the next block
    model = transformers.AutoModelForCausalLM.from_config(small(families()["deepseek_v4"])).eval()
    with pytest.raises(InputError, match="an input other than tokens, mask, token types, positions") as caught:
        trace(model, "model")
    assert "past_key_values.layers.0.buffer_kv.compressor" in str(caught.value)


def test_checkpoint_that_lacks_a_weight(llama_folder: Path, clean: Path, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    folder = shutil.copytree(llama_folder, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    message = refusal(folder, clean)
    assert "the checkpoint lacks 1 weight(s) of LlamaForCausalLM" in message
    assert "model.layers.1.mlp.up_proj.weight" in message


def test_truncated_checkpoint(llama_folder: Path, clean: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(llama_folder, tmp_path / "model")
    os.truncate(folder / "model.safetensors", 20_000)
    assert "the file is truncated or damaged: it ends at byte 20000, within this tensor" in refusal(folder, clean)


def test_wrongly_exported_graph_is_refused(
    llama_folder: Path, llama_artifact: Path, clean: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(model: Any, source: str, task: Any) -> tuple[ir.Model, list[Any]]:
        program = ir.load(llama_artifact / MODEL)
        gain = program.graph.initializers["model.layers.0.input_layernorm.weight"]
        gain.const_value = ir.tensor(gain.const_value.numpy() * np.float32(1.01))
        return program, []

    monkeypatch.setattr("graphopt.models.unrolling.trace_loaded", wrong)
    with pytest.raises(VerificationError, match="does not compute what transformers does"):
        export(llama_folder, clean)


def test_a_model_whose_positions_count_padding_is_refused_with_the_reason(
    llama_folder: Path, llama_artifact: Path
) -> None:
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(llama_folder, dtype=torch.float32)

    class CountsPadding:
        def __call__(self, **feeds: Any) -> Any:
            output = model(**feeds)
            output.logits += float(feeds["attention_mask"].all())  # a row alone is another one
            return output

    with pytest.raises(VerificationError, match="CountsPadding of transformers gives a text with padding in front"):
        check_agreement(CountsPadding, {MAIN: ir.load(llama_artifact / MODEL)})


def test_a_trace_of_one_length_is_refused(llama_artifact: Path) -> None:
    graph = ir.load(llama_artifact / MODEL).graph
    confirm_length(graph, object(), "here")
    for length in (2, "2"):
        graph.inputs[0].shape = ir.Shape(["batch", length])
        with pytest.raises(InputError, match="holds for 2 new tokens at a time only"):
            confirm_length(graph, object(), "here")


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_missing_package(package: str, llama_folder: Path, clean: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependencyError, match=r'pip install "graphopt\[export\]"'):
        export(llama_folder, clean)


# ---- the output


def test_existing_output(llama_artifact: Path, tmp_path: Path) -> None:
    output = tmp_path / "artifact"
    export(llama_artifact, output)
    before = (output / "manifest.json").read_bytes()
    assert "the output exists" in refusal(llama_artifact, output)
    assert (output / "manifest.json").read_bytes() == before
    (output / "stale").touch()
    export(llama_artifact, output, overwrite=True)
    assert not (output / "stale").exists()


def test_output_that_is_no_artifact_is_never_replaced(llama_artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").touch()
    assert "not an artifact" in refusal(llama_artifact, tmp_path, overwrite=True)
    assert (tmp_path / "thesis.txt").exists()


# ---- an .onnx file that is there already


def plain_onnx(llama_artifact: Path, folder: Path, *, data: str | None = "weights.bin") -> Path:
    """Save the graph as another exporter would: a file of any name, its weights inside or in one of any name."""
    folder.mkdir()
    model = ir.load(llama_artifact / MODEL)
    if data is None:
        model = ir.external_data.load_to_model(model)
    ir.save(model, folder / "decoder.onnx", external_data=data)
    return folder / "decoder.onnx"


@pytest.mark.parametrize("data", ["weights.bin", None])
def test_onnx_file(data: str | None, llama_artifact: Path, tmp_path: Path) -> None:
    file = plain_onnx(llama_artifact, tmp_path / "in", data=data)
    shutil.copy(llama_artifact / "tokenizer.json", file.parent)
    shutil.copy(llama_artifact / "config.json", file.parent)
    manifest = export(file, tmp_path / "out")
    assert (manifest.source.kind, manifest.source.name) == ("onnx", str(file))
    assert manifest.model.max_positions == 128
    assert manifest.weights == read_manifest(llama_artifact).weights
    assert manifest.notes == []
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        MODEL,
        DATA,
        "manifest.json",
        "tokenizer.json",
        "config.json",
        "genai_config.json",
    }
    ids, mask = np.arange(6)[None], np.ones((1, 6), np.int64)
    # The very same weights and nodes in the same runtime: not a bit may differ.
    assert np.array_equal(
        graph_logits(tmp_path / "out", ids, mask, [4, 2]), graph_logits(llama_artifact, ids, mask, [4, 2])
    )


def test_onnx_file_without_tokenizer_says_so(llama_artifact: Path, tmp_path: Path) -> None:
    manifest = export(plain_onnx(llama_artifact, tmp_path / "in"), tmp_path / "out")
    tokenizer, genai = map(str, manifest.notes)
    assert [note.code for note in manifest.notes] == ["export.no-tokenizer", "artifact.no-genai-config"]
    assert tokenizer == "no tokenizer was carried along: there is no tokenizer.json beside the model"
    assert "the number of positions" in genai


def test_artifact_keeps_its_history(llama_artifact: Path, tmp_path: Path) -> None:
    manifest = export(llama_artifact, tmp_path / "out")
    original = read_manifest(llama_artifact)
    assert manifest.model_copy(update={"files": {}}) == original.model_copy(update={"files": {}})


def test_onnx_door_needs_no_torch(llama_artifact: Path, tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = sys.modules['onnxruntime'] = None\n"
        "from graphopt.models.export import export\n"
        "export(*sys.argv[1:])"
    )
    file = plain_onnx(llama_artifact, tmp_path / "in")
    subprocess.run([sys.executable, "-c", code, file, tmp_path / "out"], check=True)
    artifact.verify_files(tmp_path / "out")


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_truncated_onnx_file(share: float, llama_artifact: Path, tmp_path: Path, clean: Path) -> None:
    file = plain_onnx(llama_artifact, tmp_path / "in")
    os.truncate(file, int(share * file.stat().st_size))
    message = refusal(file, clean)
    assert str(file) in message
    assert "truncated" in message


def test_missing_external_data(llama_artifact: Path, tmp_path: Path, clean: Path) -> None:
    file = plain_onnx(llama_artifact, tmp_path / "in")
    (file.parent / "weights.bin").unlink()
    message = refusal(file, clean)
    assert "external data is missing" in message
    assert "weights.bin" in message


def test_short_external_data(llama_artifact: Path, tmp_path: Path, clean: Path) -> None:
    file = plain_onnx(llama_artifact, tmp_path / "in")
    os.truncate(file.parent / "weights.bin", 1000)
    message = refusal(file, clean)
    assert "external data is truncated" in message
    assert "weights.bin" in message


def test_opset_that_onnxruntime_cannot_load(llama_artifact: Path, tmp_path: Path, clean: Path) -> None:
    file = plain_onnx(llama_artifact, tmp_path / "in")
    model = ir.load(file)
    model.opset_imports[""] = 27
    ir.save(model, file, external_data="other.bin")
    assert "onnxruntime cannot load opset 27" in refusal(file, clean)


def test_graph_of_another_interface(llama_artifact: Path, tmp_path: Path, clean: Path) -> None:
    file = plain_onnx(llama_artifact, tmp_path / "in")
    model = ir.load(file)
    model.graph.inputs[0].name = "tokens"
    ir.save(model, file, external_data="other.bin")
    message = refusal(file, clean)
    assert "input_ids" in message
    assert str(file) in message


def test_graph_without_cache(tmp_path: Path, clean: Path) -> None:
    shape = ir.Shape(["batch", "length"])
    ids = ir.val("input_ids", ir.DataType.INT64, shape)
    node = ir.node("Cast", [ids], {"to": ir.DataType.FLOAT})
    node.outputs[0].name = "logits"
    graph = ir.Graph([ids], node.outputs, nodes=[node], opset_imports={"": 23}, name="g")
    ir.save(ir.Model(graph, ir_version=10), tmp_path / "model.onnx")
    assert "the graph has no key-value cache" in refusal(tmp_path / "model.onnx", clean)


# ---- models that ship


def test_a_shipped_name_wins(llama_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_module, "shipped_models", lambda: {"tiny": llama_artifact})
    export("tiny", tmp_path / "out")
    artifact.verify_files(tmp_path / "out")


def test_shipped_models_are_folders_of_checkpoints() -> None:
    for name, folder in shipped_models().items():
        assert folder.name == name
        assert (folder / "config.json").is_file()
        assert (folder / "model.safetensors").is_file()
        assert (folder / "tokenizer.json").is_file()
