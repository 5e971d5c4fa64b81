from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest
from pydantic import ValidationError

from graphopt.graph import provenance
from graphopt.graph.diagnostics import PassReport
from graphopt.ort.session import ACCURACY_LEVEL, open_session, session_of
from graphopt.passes.algebra.rotate import Rotate
from graphopt.passes.codes.emulate_quantization import ROUNDED, EmulateQuantization
from graphopt.passes.codes.quantize_activations import QuantizeActivations
from graphopt.passes.codes.quantize_weights import LinearFormat, QuantizeWeights
from graphopt.runtime_ops import OPERATORS
from graphopt.tasks.causal_lm.interface import Interface
from tests.graphs import logits, relative, residual_model, save

# float32 sums of up to 64 terms in another order, 2 layers; seen 1e-6
FLOAT32 = 2e-5


def emulate(model: ir.Model, **options: object) -> PassReport:
    return EmulateQuantization(**options)(model).report  # type: ignore[arg-type, attr-defined]


def quantize(model: ir.Model) -> None:
    QuantizeWeights(linear=LinearFormat(group=16), lm_head=None, embedding=None)(model)


def trips(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph if node.op_type == "RoundTrip"]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("clip", [1.0, 0.9])
def test_products_read_rounded_tokens_and_the_head_does_not(tmp_path: Path, bits: int, clip: float) -> None:
    model = residual_model(width=16, inner=12, layers=2)
    weights = {name: value.const_value.numpy() for name, value in model.graph.initializers.items()}
    emulate(model, activations=bits, clip=clip)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * weights[f"{name}.gain"]

    def rounded(x: np.ndarray) -> np.ndarray:
        return OPERATORS["RoundTrip"].reference(x, bits, 1, clip)

    ids = np.random.default_rng(1).integers(0, 24, (3, 5))  # the tokens that `logits` takes
    x = weights["table"][ids]
    for layer in range(2):
        hidden = 1 / (1 + np.exp(-(rounded(norm(x, f"norm{layer}")) @ weights[f"up{layer}.weight"])))
        x = x + rounded(hidden) @ weights[f"down{layer}.weight"]
    expected = norm(x, "final_norm") @ weights["head.weight"]
    assert relative(expected, logits(model, tmp_path)) < FLOAT32


def test_codes_of_weights_may_come_before_or_after_and_are_still_fused(tmp_path: Path) -> None:
    before, after = residual_model(width=32, inner=48), residual_model(width=32, inner=48)
    emulate(before)
    quantize(before)
    quantize(after)
    emulate(after)
    seen = []
    for name, model in (("before", before), ("after", after)):
        (tmp_path / name).mkdir()
        path, optimized = save(model, tmp_path / name), tmp_path / name / "optimized.onnx"
        session = open_session(path, entries={ACCURACY_LEVEL: "0"}, optimized_to=optimized)
        kinds = Counter(node.op_type for node in ir.load(optimized).graph)
        assert (kinds["MatMulNBits"], kinds["DequantizeLinear"]) == (4, 0)
        seen.append(session.run(["logits"], {"input_ids": np.arange(10).reshape(2, 5)})[0])
    assert len(trips(before)) == len(trips(after)) == 4
    assert np.array_equal(*seen)


def test_inputs_that_are_rounded_to_4_bits_are_left_alone() -> None:
    model = residual_model(width=32, inner=48)
    quantize(model)
    QuantizeActivations(bits=4, scales="group")(model)
    report = emulate(model, activations=8)
    assert not trips(model)
    assert sum(skip.reason == ROUNDED() for skip in report.skips) == 4


def test_a_tensor_of_several_products_is_rounded_once(llama_canonical: ir.Model) -> None:
    report = emulate(llama_canonical)
    readers = [
        sorted((use.node.name or "").split(".")[-2] for use in n.outputs[0].uses()) for n in trips(llama_canonical)
    ]
    assert readers == 2 * [["k_proj", "q_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]]
    assert len(report.changes) == len(readers)
    assert any(skip.where == "lm_head.MatMul" and "makes the logits" in str(skip.reason) for skip in report.skips)


def test_a_cache_holds_rounded_tokens_and_pieces_see_what_a_whole_sees(llama_canonical: ir.Model) -> None:
    report = emulate(llama_canonical, activations=None, cache=4)
    assert len(trips(llama_canonical)) == len(report.changes) == 4  # keys and values of two layers
    interface = Interface.of_graph(llama_canonical.graph)
    ids = np.random.default_rng(0).integers(0, 256, (2, 12))
    mask = np.ones_like(ids)
    outputs = ["logits", *interface.present]
    with session_of(llama_canonical) as session:
        whole = session.run(outputs, interface.feeds(ids, mask, interface.empty_past(2)))
        _, *present = session.run(outputs, interface.feeds(ids[:, :8], mask[:, :8], interface.empty_past(2)))
        past = dict(zip(interface.past, present, strict=True))
        rest = session.run(outputs, interface.feeds(ids[:, 8:], mask, past))
    for cache in whole[1:]:
        assert cache.shape[-1] > 8
        levels = [len(np.unique(row)) for row in cache.reshape(-1, cache.shape[-1])]
        assert 8 < max(levels) <= 16
    for old, new in zip(present, rest[1:], strict=True):
        assert np.array_equal(old, new[:, :, :8])  # what is stored is not rounded again
    assert relative(whole[0][:, 8:], rest[0]) < FLOAT32


def test_a_cache_that_a_concat_extends_holds_rounded_tokens() -> None:
    report = emulate(model := concat_model("past, new"), activations=None, cache=8)
    assert [change.where for change in report.changes] == ["past_key_values.0.key.round_trip"]
    assert [use.node.op_type for use in trips(model)[0].outputs[0].uses()] == ["Concat"]


@pytest.mark.parametrize(
    ("model", "where", "reason"),
    [
        (residual_model(), "cache", "no input past_key_values"),
        ("new, past", "past_key_values.0.key", "read by: Concat"),
        ("past, past", "past_key_values.0.key", "read by: Concat, Concat"),
    ],
)
def test_a_cache_that_is_left_alone_has_its_reason(model: ir.Model | str, where: str, reason: str) -> None:
    model = concat_model(model) if isinstance(model, str) else model
    report = emulate(model, activations=None, cache=4)
    assert not report.changes
    assert any(skip.where == where and reason in str(skip.reason) for skip in report.skips)


def concat_model(order: str) -> ir.Model:
    """Return a model whose cache is past and new keys, put together in this ``order``."""
    names = {"past": '"past_key_values.0.key"', "new": '"new"'}
    inputs = ", ".join(names[name] for name in order.split(", "))
    text = f"""<ir_version: 10, opset_import: ["" : 23]>
        g (float[batch, 2, past, 8] "past_key_values.0.key", float[batch, 2, length, 8] k)
          => (float[batch, 2, total, 8] "present.0.key")
          <float[batch, 2, length, 8] new> {{
            new = Neg(k)
            "present.0.key" = Concat<axis = 2>({inputs})
        }}"""
    return ir.serde.deserialize_model(onnx.parser.parse_model(text))


def test_every_change_says_that_it_is_emulated_and_where_it_came_from(llama_canonical: ir.Model) -> None:
    report = emulate(llama_canonical, cache=8)
    assert report.effect == "lossy"
    assert report.changes
    assert all(str(change.what).startswith("emulated: ") for change in report.changes)
    for node in trips(llama_canonical):
        passes, sources = provenance.history(node)
        assert passes[-1] == "emulate_quantization"
        assert sources


def test_a_rotation_that_comes_too_late_leaves_rounded_tokens_alone(tmp_path: Path) -> None:
    model = residual_model(gains=False)
    emulate(model)
    before = logits(model, tmp_path / "before")
    report = Rotate()(model).report  # type: ignore[attr-defined]
    assert any("RoundTrip" in str(skip.reason) for skip in report.skips)
    assert relative(before, logits(model, tmp_path / "after")) < FLOAT32


@pytest.mark.parametrize("bad", [{"activations": 3}, {"cache": 16}, {"clip": 0.0}, {"cache_clip": 1.5}])
def test_options_that_cannot_run_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        EmulateQuantization(**bad)  # type: ignore[arg-type]
