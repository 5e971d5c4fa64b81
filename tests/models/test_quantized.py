from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from safetensors.torch import load_file, save_file

from graphopt.analysis.structure.cost import weight_totals
from graphopt.analysis.structure.products import linear_nodes
from graphopt.artifact.artifact import MODEL
from graphopt.compile.pipeline import optimize
from graphopt.errors import InputError
from graphopt.graph.diagnostics import Rule
from graphopt.graph.weights import Transpose, WeightTensor, weight_of
from graphopt.graph.weights.safetensors_files import tensors_of_folder
from graphopt.models.export import export
from graphopt.models.loading import load
from graphopt.ort.session import open_session
from graphopt.passes.codes.keep_codes import NOT_OF_FILE, NOT_USED
from graphopt.passes.lower.compact_scales import FLOAT8_SCALES, NESTED_SCALES
from graphopt.passes.recipe import Recipe
from graphopt.quantization.checkpoints.importer import IMPORTERS, coded_matrices, decoded_weights
from graphopt.runtime_ops import declare, port
from graphopt.tasks.causal_lm.interface import Interface
from tests.graphs import residual_model, run_pass, save
from tests.quantized_checkpoints import (
    FP4,
    GROUP,
    QuantizedMatrix,
    Quantizer,
    awq,
    bitnet,
    bitsandbytes,
    bitsandbytes_int8,
    compressed_tensors,
    exl3,
    expected_logits,
    fp8,
    gptq,
    int8_rows,
    nvfp4,
    write_base,
    write_quantized,
)

# Zero points in the middle of the codes are none of ours: codes are then two's complement.
SIGNED_CASES = ("gptq-2", "gptq-3", "gptq-4", "gptq-8", "autoround", "compressed-4", "compressed-8")
# Sums in another order, through two layers, of weights that are the same to the last bit.
TOLERANCE = 1e-5
# A scale for each row and block of columns takes 32 bits for 128 weights of 8 bits, where theirs is one for 128 rows.
# Zero points of matrices take 16 bits, where theirs take 3.
LARGER = {
    "fp8-block": 1.032,
    "gptq-3-points": 1.033,
}
IDS = np.random.default_rng(7).integers(0, 96, (2, 12))

Checkpoints = Callable[[str], tuple[Path, dict[str, QuantizedMatrix]]]
GPTQ = {"quant_method": "gptq", "group_size": GROUP}
AUTOROUND = {"quant_method": "auto-round", "bits": 4, "group_size": GROUP}
COMPRESSED_TENSORS = {"quant_method": "compressed-tensors"}
BITSANDBYTES = {"quant_method": "bitsandbytes", "bits": 4, "load_in_4bit": True}
CASES: dict[str, tuple[Quantizer, dict[str, Any]]] = {
    **{f"gptq-{bits}": (gptq(bits, symmetric=True), {**GPTQ, "bits": bits}) for bits in (2, 3, 4, 8)},
    **{f"gptq-{bits}-points": (gptq(bits, symmetric=False), {**GPTQ, "bits": bits}) for bits in (3, 4, 8)},
    "gptq-v2": (gptq(4, symmetric=False, version=2), {**GPTQ, "bits": 4, "checkpoint_format": "gptq_v2"}),
    "gptq-order": (gptq(4, symmetric=False, act_order=True), {**GPTQ, "bits": 4, "desc_act": True}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}),
    "autoround": (gptq(4, symmetric=True), {"quant_method": "auto-round", "bits": 4, "group_size": GROUP}),
    "autoround-awq": (awq, {**AUTOROUND, "packing_format": "auto_round:auto_awq"}),
    "compressed-4": (
        compressed_tensors(4, symmetric=True),
        {**COMPRESSED_TENSORS, "format": "pack-quantized", "bits": 4},
    ),
    "compressed-4-points": (
        compressed_tensors(4, symmetric=False),
        {**COMPRESSED_TENSORS, "format": "pack-quantized", "bits": 4},
    ),
    "compressed-8": (compressed_tensors(8, symmetric=True), {**COMPRESSED_TENSORS, "format": "pack-quantized"}),
    "compressed-int8": (int8_rows, {**COMPRESSED_TENSORS, "format": "int-quantized"}),
    "compressed-fp8": (fp8("row", ".weight_scale"), {**COMPRESSED_TENSORS, "format": "float-quantized"}),
    "compressed-nvfp4": (
        functools.partial(nvfp4, is_modelopt=False),
        {**COMPRESSED_TENSORS, "format": "nvfp4-pack-quantized", "bits": 4},
    ),
    "modelopt-nvfp4": (nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4", "bits": 4}),
    "modelopt-fp8": (fp8("tensor", ".weight_scale"), {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "nf4": (bitsandbytes("nf4", double_quant=False), {**BITSANDBYTES}),
    "nf4-nested": (bitsandbytes("nf4", double_quant=True), {**BITSANDBYTES}),
    "fp4-nested": (bitsandbytes("fp4", double_quant=True), {**BITSANDBYTES}),
    "llm-int8": (bitsandbytes_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "bitnet": (bitnet, {"quant_method": "bitnet", "bits": 2}),
    "fp8-tensor": (fp8("tensor", ".weight_scale"), {"quant_method": "fp8"}),
    "fp8-row": (fp8("row", ".weight_scale"), {"quant_method": "fbgemm_fp8"}),
    "fp8-block": (fp8("block"), {"quant_method": "fp8", "weight_block_size": [128, 128]}),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantized") / "base"
    write_base(folder)
    return folder


@pytest.fixture(scope="module")
def checkpoint(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    @functools.cache
    def write(case: str) -> tuple[Path, dict[str, QuantizedMatrix]]:
        folder = tmp_path_factory.mktemp("quantized") / case
        return folder, write_quantized(base, folder, *CASES[case])

    return write


@pytest.fixture(scope="module")
def order_export(checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The export of a checkpoint whose groups are in the order of activations; tracing takes seconds, so it is one."""
    output = tmp_path_factory.mktemp("quantized") / "exported"
    export(checkpoint("gptq-order")[0], output)
    return output


def logits(path: Path) -> np.ndarray:
    session = open_session(path, entries={"session.qdq_matmulnbits_accuracy_level": "0"})
    interface = Interface.of_session(session)
    feeds = interface.feeds(IDS, np.ones_like(IDS), interface.empty_past(len(IDS)))
    result: np.ndarray = session.run(["logits"], feeds)[0]
    return result


def with_weights(float_export: Path, folder: Path) -> ir.Model:
    """Return the exported graph with the weights of another checkpoint."""
    model, weights = ir.load(float_export / MODEL), load(str(folder)).weights
    for node in linear_nodes(model.graph):
        value = weight_of(node, 1)
        assert value is not None
        assert value.name is not None
        value.const_value = WeightTensor(Transpose(weights[value.name], (1, 0)), value.name)
    return model


def test_every_importer_has_a_case() -> None:
    assert {settings["quant_method"] for _, settings in CASES.values()} == set(IMPORTERS) - {"mxfp4", "exl3"}


def test_experts_in_mxfp4_mean_what_the_layout_defines(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    codes = random.integers(0, 16, (3, 8, 64)).astype(np.uint8)
    exponents = random.integers(118, 128, (3, 8, 2)).astype(np.uint8)
    blocks = torch.from_numpy((codes[..., ::2] | codes[..., 1::2] << 4).reshape(3, 8, 2, 16))
    tensors = {"mlp.gate_up_proj_blocks": blocks, "mlp.gate_up_proj_scales": torch.from_numpy(exponents)}
    save_file(tensors, tmp_path / "model.safetensors")
    expressions = tensors_of_folder(tmp_path)
    assert expressions is not None
    weights = decoded_weights(expressions, {"quant_method": "mxfp4"}, str(tmp_path))
    expected = FP4[codes] * np.repeat(2.0 ** (exponents.astype(np.float32) - 127), 32, -1)
    assert list(weights) == ["mlp.gate_up_proj"]
    assert np.array_equal(weights["mlp.gate_up_proj"].numpy(), expected.swapaxes(1, 2))


def test_experts_in_mxfp4_are_kept_at_their_codes(tmp_path: Path) -> None:
    model = residual_model(width=64, inner=96)
    products = [node for node in linear_nodes(model.graph) if weight_of(node, 1).shape == (64, 96)]  # type: ignore[union-attr]
    random = np.random.default_rng(0)
    codes = random.integers(0, 16, (len(products), 96, 64)).astype(np.uint8)
    exponents = random.integers(118, 128, (len(products), 96, 2)).astype(np.uint8)
    blocks = torch.from_numpy((codes[..., ::2] | codes[..., 1::2] << 4).reshape(len(products), 96, 2, 16))
    tensors = {"mlp.up_proj_blocks": blocks, "mlp.up_proj_scales": torch.from_numpy(exponents)}
    save_file(tensors, tmp_path / "model.safetensors")
    settings = {"quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    (matrix,) = coded_matrices(tmp_path).values()
    experts = matrix.numpy().reshape(codes.shape)
    first_report = run_pass(ir.from_proto(ir.to_proto(model)), "keep_codes", file=tmp_path)
    assert [skip.where for skip in first_report.skips if skip.reason == NOT_USED()] == ["mlp.up_proj"]
    for node, expert in zip(products, experts, strict=True):
        weight = weight_of(node, 1)
        assert weight is not None
        weight.const_value = ir.tensor(np.ascontiguousarray(expert.T), name=weight.name)
    report = run_pass(model, "keep_codes", file=tmp_path)
    assert not [skip for skip in report.skips if skip.reason == NOT_USED()]
    for node, expert in zip(products, codes, strict=True):
        reader = node.inputs[1].producer()
        assert reader is not None
        stored_codes = port(reader, "codes")
        assert stored_codes is not None
        assert stored_codes.const_value is not None
        assert np.array_equal(stored_codes.const_value.numpy().T, expert)


EXL3 = {"quant_method": "exl3", "version": "0.0.9"}


@pytest.mark.parametrize(
    ("bits", "generator", "signs_alone"), [(2, "", True), (3, "mcg", False), (4, "mul1", False), (5, "", False)]
)
def test_trellises_behind_rotations_mean_what_the_layout_defines(
    bits: int, generator: str, signs_alone: bool, tmp_path: Path
) -> None:
    layer = exl3(bits, generator, signs_alone=signs_alone)(np.random.default_rng(bits), (256, 128))
    tensors = {f"proj{part}": tensor for part, tensor in layer.tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    expressions = tensors_of_folder(tmp_path)
    assert expressions is not None
    weights = decoded_weights(expressions, EXL3, str(tmp_path))
    assert list(weights) == ["proj.weight"]
    matrix = weights["proj.weight"]
    # sums of 128 numbers in float64, twice, rounded once more to float32
    bound = 1e-6 * np.abs(layer.matrix).max()
    assert np.abs(matrix.numpy() - layer.matrix).max() <= bound
    part = (slice(100, 200), slice(3, 70))
    assert np.array_equal(matrix.evaluate(part), matrix.numpy()[part])


@pytest.mark.parametrize(
    ("part", "replacement", "message"),
    [
        (".svh", None, "lacks a tensor"),
        (".suh", torch.zeros(64, dtype=torch.float16), "should be [128]"),
        (".trellis", torch.zeros(8, 8, 40, dtype=torch.int16), "1 to 8 whole bits"),
        (".trellis", torch.zeros(8, 3, 48, dtype=torch.int16), "multiples of 128"),
        (".mcg", torch.tensor(5, dtype=torch.int32), "should be 0xcbac1fed"),
    ],
)
def test_a_trellis_that_does_not_fit_is_refused(
    part: str, replacement: torch.Tensor | None, message: str, tmp_path: Path
) -> None:
    tensors = {
        "proj.trellis": torch.zeros(8, 8, 48, dtype=torch.int16),
        "proj.suh": torch.ones(128, dtype=torch.float16),
        "proj.svh": torch.ones(128, dtype=torch.float16),
        "proj.mcg": torch.tensor(0xCBAC1FED - 2**32, dtype=torch.int32),
    }
    del tensors[f"proj{part}"]
    if replacement is not None:
        tensors[f"proj{part}"] = replacement
    save_file(tensors, tmp_path / "model.safetensors")
    expressions = tensors_of_folder(tmp_path)
    assert expressions is not None
    with pytest.raises(InputError) as refusal:
        decoded_weights(expressions, EXL3, str(tmp_path))
    assert message in str(refusal.value)
    assert f"proj{part}" in str(refusal.value)


@pytest.mark.parametrize("case", CASES)
def test_matrices_mean_what_the_layout_defines(case: str, checkpoint: Checkpoints) -> None:
    folder, layers = checkpoint(case)
    model = load(str(folder))
    for name, layer in layers.items():
        expression = model.weights[name]
        assert np.array_equal(expression.numpy(), layer.matrix), name
        # a part of a matrix is read by itself, wherever groups and integers begin
        assert np.array_equal(expression.evaluate((slice(3, 50), slice(97, 201))), layer.matrix[3:50, 97:201])
    assert f"{len(layers)} matrices are decoded from codes of" in str(model.notes[0])
    assert set(coded_matrices(folder)) == set(layers)


@pytest.mark.parametrize("case", CASES)
def test_codes_are_kept(case: str, base: Path, order_export: Path, checkpoint: Checkpoints, tmp_path: Path) -> None:
    folder, layers = checkpoint(case)
    model = with_weights(order_export, folder)
    report = run_pass(model, "keep_codes", file=folder)
    assert {skip.reason for skip in report.skips} == {NOT_OF_FILE()}  # lm_head and embedding, which are floats
    for name, layer in layers.items():
        stored_codes = model.graph.initializers[f"{name}.codes"]
        assert stored_codes.const_value is not None
        bits, is_signed = CASES[case][1].get("bits", 8), case in SIGNED_CASES
        codes = stored_codes.const_value.numpy().astype(np.int16).T % 2**bits
        expected = (layer.codes[:, layer.order].astype(np.int16) - is_signed * 2 ** (bits - 1)) % 2**bits
        assert np.array_equal(codes, expected)
    run_pass(model, "lower", target="ort-cpu", instructions="avx2", activations="float32")
    run_pass(model, "compact_scales")
    file_bytes = sum(
        tensor.nbytes for layer in layers.values() for part, tensor in layer.tensors.items() if part != ".g_idx"
    )
    values = model.graph.initializers.values()
    graph_bytes = sum(
        value.const_value.nbytes for value in values if "proj.weight" in (value.name or "") and value.const_value
    )
    assert graph_bytes <= LARGER.get(case, 1.03) * file_bytes
    declare(model)
    expected = expected_logits(base, layers, IDS)
    result = logits(save(model, tmp_path))
    assert np.abs(result - expected).max() <= TOLERANCE * np.abs(expected).max()


def test_a_checkpoint_is_optimized_at_its_own_codes(
    base: Path, order_export: Path, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    folder, layers = checkpoint("gptq-order")
    expected = expected_logits(base, layers, IDS)
    bound = TOLERANCE * np.abs(expected).max()
    assert np.abs(logits(order_export / MODEL) - expected).max() <= bound
    steps = [{"step": "keep_codes", "file": str(folder)}]
    recipe = Recipe.model_validate({"name": "keep", "activations": "float32", "steps": steps})
    optimize(order_export, recipe, tmp_path / "kept", quality_tokens=0)
    assert np.abs(logits(tmp_path / "kept" / MODEL) - expected).max() <= bound
    graph = ir.load(tmp_path / "kept" / MODEL).graph
    # queries, keys and values read one input in one order, and so do gate and up
    orders = [node for node in graph if node.op_type == "Gather" and ".order." in (node.name or "")]
    assert len(orders) == 4


@pytest.mark.parametrize(
    ("case", "rule", "kind"),
    [
        ("modelopt-nvfp4", FLOAT8_SCALES, ir.DataType.FLOAT8E4M3FN),
        ("nf4-nested", NESTED_SCALES, ir.DataType.UINT8),
    ],
)
def test_scales_in_two_levels_stay_bytes(
    case: str, rule: Rule, kind: ir.DataType, order_export: Path, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """Also where products are merged that have a number over their scales each; and widened they are what they were."""
    folder, _ = checkpoint(case)
    model = with_weights(order_export, folder)
    for name, options in (
        ("canonicalize", {}),
        ("keep_codes", {"file": folder}),
        ("merge_products", {}),
        ("lower", {"target": "ort-cpu", "instructions": "avx2", "activations": "float32"}),
    ):
        run_pass(model, name, **options)
    declare(model)
    before, parameters = logits(save(model, tmp_path)), weight_totals(model).parameters
    report = run_pass(model, "compact_scales")
    assert weight_totals(model).parameters == parameters
    assert rule.code in {change.what.code for change in report.changes}
    kinds = {value.const_value.dtype for name, value in model.graph.initializers.items() if name.endswith(".levels")}
    assert kinds == {kind}
    declare(model)
    assert np.array_equal(logits(save(model, tmp_path)), before)
    report = run_pass(model, "widen_scales")
    assert report.changes
    assert not [name for name in model.graph.initializers if name.endswith((".levels", ".steps"))]
    declare(model)
    assert np.array_equal(logits(save(model, tmp_path)), before)


def refusal_of_edit(folder: Path, output: Path, edit: Callable[[dict[str, torch.Tensor], dict[str, Any]], None]) -> str:
    """Return the refusal of a checkpoint whose tensors and settings were changed."""
    shutil.copytree(folder, output)
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    edit(tensors, config["quantization_config"])
    save_file(tensors, output / "model.safetensors", metadata={"format": "pt"})
    (output / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError) as refusal:
        load(str(output))
    return str(refusal.value)


LAYER = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("case", "part", "replacement", "message"),
    [
        ("gptq-4", ".scales", None, "lacks a tensor"),
        ("gptq-4", ".qzeros", torch.zeros(1, 1, dtype=torch.int32), r"should be [2, 32]"),
        ("gptq-4", ".g_idx", torch.zeros(3, dtype=torch.int32), r"should be [256]"),
        ("awq", ".scales", torch.zeros(1, 256), r"should be [2, 256]"),
        ("compressed-4", ".weight_packed", torch.zeros(256, 12, dtype=torch.int32), "takes no codes of 1 bits"),
        ("compressed-4", ".weight_scale", torch.zeros(256, 3), "no scales of a matrix of 256 rows and 256 columns"),
        ("modelopt-nvfp4", ".weight_scale", torch.zeros(256, 8), "should be [256, 16]"),
        ("nf4", ".weight", torch.zeros(5, 1, dtype=torch.uint8), "does not hold 256 x 256 codes of 4 bits"),
        ("nf4", ".weight.quant_state.bitsandbytes__nf4", torch.zeros(5, dtype=torch.uint8), "does not say shape"),
        ("llm-int8", ".SCB", torch.zeros(3), "should be [256]"),
        ("llm-int8", ".weight_format", torch.tensor(1), "do not lie one behind the other"),
        ("bitnet", ".weight_scale", torch.zeros(1), "should be one number"),
        ("fp8-block", ".weight", torch.zeros(256, 256), "is no matrix of 8 bits"),
        ("fp8-block", ".weight_scale_inv", torch.zeros(3, 2), "no scales of a matrix of 256 rows and 256 columns"),
    ],
)
def test_a_layer_that_does_not_fit_is_refused(
    case: str, part: str, replacement: torch.Tensor | None, message: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    def edit(tensors: dict[str, torch.Tensor], settings: dict[str, Any]) -> None:
        del settings
        del tensors[LAYER + part]
        if replacement is not None:
            tensors[LAYER + part] = replacement

    refusal = refusal_of_edit(checkpoint(case)[0], tmp_path / "model", edit)
    assert message in refusal
    assert LAYER + part in refusal
    assert str(tmp_path / "model") in refusal


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "vptq"}, "by a method that graphopt cannot read: vptq"),
        ({"bits": 5}, "has bits 5, and graphopt knows 2, 3, 4, 8"),
        ({"checkpoint_format": "marlin"}, "has checkpoint_format 'marlin'"),
        ({"quant_method": "fp8"}, "has no tensors of fp8"),
    ],
)
def test_settings_that_are_not_known_are_refused(
    settings: dict[str, Any], message: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    refusal = refusal_of_edit(checkpoint("gptq-4")[0], tmp_path / "model", lambda _, old: old.update(settings))
    assert message in refusal
    assert str(tmp_path / "model") in refusal


def test_keep_codes_needs_a_quantized_folder(base: Path, order_export: Path) -> None:
    with pytest.raises(InputError, match="holds no quantized checkpoint"):
        run_pass(ir.load(order_export / MODEL), "keep_codes", file=base)
