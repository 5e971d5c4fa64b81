from __future__ import annotations

import dataclasses
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from graphopt.analysis.bases.axes import WeightAxis
from graphopt.graph import provenance
from graphopt.graph.diagnostics import PassReport
from graphopt.graph.weights import Array, Expression, Inline, Region, Shape
from graphopt.numerics.rotations import Rotation
from graphopt.passes.algebra.fold_norms import FoldNorms
from graphopt.passes.algebra.rotate import Rotate
from graphopt.runtime_ops import DOMAIN, OPERATORS, declare
from tests.graphs import VOCABULARY, Builder, logits, relative, residual_model, session

# float32: each weight is rounded once more after the rotation, sums of up to 24 terms, 3 layers; seen 5e-7.
FLOAT32 = 5e-6
ROOT = Path(__file__).parents[3]


def rotate(model: ir.Model, **options: object) -> PassReport:
    return Rotate(**options)(model).report  # type: ignore[arg-type, attr-defined]


def weights(model: ir.Model) -> dict[str, np.ndarray]:
    return {name: value.const_value.numpy().copy() for name, value in model.graph.initializers.items()}


@given(
    seed=st.integers(0, 1000),
    width=st.sampled_from([4, 6, 12, 16, 20, 24]),
    layers=st.integers(1, 3),
    biased=st.booleans(),
    multiplier=st.sampled_from([None, 3.0]),
    kind=st.sampled_from(["hadamard", "random"]),
)
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_logits_stay_and_every_weight_of_the_residual_moves(
    tmp_path: Path, seed: int, width: int, layers: int, biased: bool, multiplier: float | None, kind: str
) -> None:
    model = residual_model(width, layers=layers, seed=seed, biases=biased, multiplier=multiplier)
    FoldNorms()(model)
    before, old = logits(model, tmp_path / "before"), weights(model)
    rotate(model, residual=kind, seed=seed)
    assert relative(before, logits(model, tmp_path / "after")) < FLOAT32
    moved = {name for name, array in weights(model).items() if not np.array_equal(array, old[name])}
    expected = {"table", "head.weight", *(f"{name}{n}.weight" for name in ("up", "down") for n in range(layers))}
    assert moved == expected | ({f"down{n}.bias" for n in range(layers)} if biased else set())


def test_an_outlier_in_one_coordinate_is_spread_over_all() -> None:
    model = residual_model(width=64, gains=False)
    table = model.graph.initializers["table"].const_value.numpy().copy()
    table[:, 7] *= 100
    model.graph.initializers["table"].const_value = ir.tensor(table, name="table")
    rotate(model)
    after = model.graph.initializers["table"].const_value.numpy()
    peak = lambda array: np.abs(array).max() / np.sqrt((array**2).mean())  # noqa: E731
    # before: one column holds nearly all the energy, peak/rms is near sqrt(64); after: near a Gaussian's extreme
    assert peak(table) > 8
    assert peak(after) < 4


def test_what_is_pinned_stays_with_the_node_that_pins_it(tmp_path: Path) -> None:
    model = residual_model(post_norm=True)
    FoldNorms()(model)
    old = weights(model)
    report = rotate(model)
    assert not report.changes
    assert any(skip.node == "post_norm0" and "gain of its own" in str(skip.reason) for skip in report.skips)
    assert all(np.array_equal(array, old[name]) for name, array in weights(model).items())


def test_a_tied_head_gets_weights_of_its_own(tmp_path: Path) -> None:
    from graphopt.passes.lift.canonicalize import Canonicalize

    model = residual_model(tied=True)
    before = logits(model, tmp_path / "before")
    Canonicalize()(model)
    FoldNorms()(model)
    rotate(model)
    assert relative(before, logits(model, tmp_path / "after")) < FLOAT32


def test_the_seed_decides_and_is_recorded() -> None:
    models = [residual_model(gains=False) for _ in range(3)]
    for model, seed in zip(models, (1, 1, 2), strict=True):
        rotate(model, seed=seed)
    one, same, other = (weights(model)["table"] for model in models)
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)
    assert provenance.history(models[0].graph.initializers["table"])[0] == ["rotate"]


def test_a_width_without_a_hadamard_matrix_is_rotated_in_blocks_and_said(tmp_path: Path) -> None:
    model = residual_model(width=10, gains=False)
    before = logits(model, tmp_path / "before")
    report = rotate(model)
    assert report.changes
    assert all("Hadamard in 5 blocks of 2" in str(change.what) for change in report.changes)
    assert relative(before, logits(model, tmp_path / "after")) < FLOAT32


def test_unknown_options_are_refused() -> None:
    with pytest.raises(ValidationError, match="residual"):
        Rotate(residual="diagonal")  # type: ignore[arg-type]


def test_an_exported_llama_keeps_its_logits(llama_canonical: ir.Model, tmp_path: Path) -> None:
    from graphopt.verification.equivalence import TOLERANCE, Verifier

    verifier = Verifier(tmp_path, {})
    verifier.start(llama_canonical)
    report = rotate(llama_canonical)
    # the residual's writers and readers, and the value and output projection of each layer
    assert len(report.changes) == 5 + 11 + 2 * 2
    assert verifier.check(llama_canonical, "rotate", "exact").figures["largest_change"] < TOLERANCE


ALL = {"query_key": "hadamard", "weight_inputs": "hadamard", "online_residual": True}


def hadamards(model: ir.Model) -> list[str]:
    """Return what each Hadamard node of the graph rotates."""
    return [node.inputs[0].name for node in model.graph if node.op_type == "Hadamard"]


def test_everything_at_once_is_proved_and_runs(llama_canonical: ir.Model, tmp_path: Path) -> None:
    from graphopt.verification.certificate.checker import check
    from graphopt.verification.equivalence import Verifier

    verifier = Verifier(tmp_path, {})
    verifier.start(llama_canonical)
    before = llama_canonical.clone()
    report = rotate(llama_canonical, **ALL)
    # per layer: queries and keys behind their rotary embeddings, and what the down projection reads
    assert [name.rsplit(".", 2)[-2] for name in hadamards(llama_canonical)] == [
        "RotaryEmbedding",
        "RotaryEmbedding_1",
        "Mul",
    ] * 2
    certificate = check(before, llama_canonical, report.claims)
    assert certificate.status == "proved", certificate.findings
    assert verifier.check(llama_canonical, "rotate", "exact").figures["largest_change"] < FLOAT32


def recurrent_model(width: int = 16, heads: int = 2) -> ir.Model:
    """Return logits = head(x + output(recurrence of x)), with a gated delta rule whose state is a port."""
    build = Builder(np.random.default_rng(0), [], [])
    ids = ir.val("input_ids", ir.DataType.INT64, ["batch", "length"])
    dims = ["batch", heads, width // heads, width // heads]
    past = ir.val("past_key_values.0.recurrent_state", ir.DataType.FLOAT, dims)
    x = build.op("Gather", [build.weight("table", VOCABULARY, width), ids], width, "embedding", axis=0)

    def of_heads(name: str, size: int) -> ir.Value:
        columns = heads * size
        value = build.op("MatMul", [x, build.weight(f"{name}.weight", width, columns)], columns, name)
        target = build.constant(f"{name}.shape", np.array([0, 0, heads, size], np.int64))
        value = build.op("Reshape", [value, target], None, f"{name}.heads")
        value.shape = ir.Shape(["batch", "length", heads, size])
        return value

    query, key, value = (of_heads(name, width // heads) for name in ("query", "key", "value"))
    decay = build.op("Neg", [of_heads("decay", 1)], None, "negative")
    beta = build.op("Sigmoid", [of_heads("beta", 1)], None, "sigmoid")
    decay.shape = beta.shape = ir.Shape(["batch", "length", heads, 1])
    mask = ir.val("mask", ir.DataType.INT64, ["batch", "length"])
    inputs = [query, key, value, decay, beta, mask, past]
    node = OPERATORS["LinearRecurrence"].node(inputs, {"delta": 1, "scale": 0.5}, name="recurrence")
    output, state = node.outputs
    output.name, state.name = "recurrence.out", "present.0.recurrent_state"
    build.nodes.append(node)
    flat = build.op("Reshape", [output, build.constant("flat", np.array([0, 0, -1], np.int64))], width, "flat")
    y = build.op("MatMul", [flat, build.weight("output.weight", width, width)], width, "output")
    residual = build.op("Add", [x, y], width, "sum")
    head = build.op("MatMul", [residual, build.weight("head", width, VOCABULARY)], VOCABULARY, "logits")
    head.name = "logits"
    ports, opsets = ([ids, mask, past], [head, state]), {"": 23, DOMAIN: 1}
    graph = ir.Graph(*ports, nodes=build.nodes, initializers=build.weights, opset_imports=opsets, name="small")
    model = ir.Model(graph, ir_version=10)
    declare(model)
    return model


def test_values_of_a_recurrence_rotate_with_its_state_and_it_is_proved(tmp_path: Path) -> None:
    from graphopt.verification.certificate.checker import check

    model = recurrent_model()
    before = model.clone()
    report = rotate(model)
    assert {"value.weight", "output.weight"} <= {change.where for change in report.changes}
    certificate = check(before, model, report.claims)
    assert certificate.status == "proved", certificate.findings
    assert "past_key_values.0.recurrent_state" in {claim.tensor for claim in report.claims.tensors}
    random = np.random.default_rng(1)
    feeds = {
        "input_ids": random.integers(0, VOCABULARY, (2, 7)),
        "mask": random.integers(0, 2, (2, 7)),
        "past_key_values.0.recurrent_state": np.zeros((2, 2, 8, 8), np.float32),
    }
    first = session(before, tmp_path / "before").run(["logits"], feeds)[0]
    assert relative(first, session(model, tmp_path / "after").run(["logits"], feeds)[0]) < FLOAT32


def test_the_caches_hold_rotated_keys_and_values(llama_canonical: ir.Model) -> None:
    report = rotate(llama_canonical, **ALL)
    claimed = {claim.tensor for claim in report.claims.tensors}
    assert {f"past_key_values.{layer}.{what}" for layer in range(2) for what in ("key", "value")} <= claimed


@pytest.mark.parametrize(("what", "count"), [("query_key", 4), ("weight_inputs", 2)])
def test_only_what_the_recipe_enables_runs_online(llama_canonical: ir.Model, what: str, count: int) -> None:
    report = rotate(llama_canonical, residual=None, value=None, **{what: "hadamard"})
    assert len(hadamards(llama_canonical)) == count
    assert sum("reads weight_input" in str(change.what) for change in report.changes) == (
        2 if what == "weight_inputs" else 0
    )
    # a basis that could be rotated for free but is not enabled is reported
    assert any("the recipe leaves residual bases" in str(skip.reason) for skip in report.skips)


def test_a_norm_with_a_gain_behind_it_is_paid_for_only_if_asked(tmp_path: Path) -> None:
    model = residual_model(post_norm=True, layers=2)
    FoldNorms()(model)
    before = logits(model, tmp_path / "before")
    rotate(model, online_residual=True)
    assert hadamards(model) == ["post_norm0.out", "post_norm1.out"]
    assert relative(before, logits(model, tmp_path / "after")) < FLOAT32


def test_weights_of_a_pinned_basis_read_it_rotated(tmp_path: Path) -> None:
    # The app sees the residual, so it stays; each reader gets a rotation in front of it, shared by equal inputs.
    model = residual_model(residual_output=True, gains=False)
    before = logits(model, tmp_path / "before")
    rotate(model, weight_inputs="hadamard")
    assert hadamards(model) == ["norm0.out", "sigmoid0.out", "norm1.out", "sigmoid1.out", "final_norm.out"]
    assert relative(before, logits(model, tmp_path / "after")) < FLOAT32


def test_the_lm_head_can_be_spared(tmp_path: Path) -> None:
    model = residual_model(residual_output=True, gains=False)
    before = logits(model, tmp_path / "before")
    report = rotate(model, weight_inputs="hadamard", spare_lm_head=True)
    assert hadamards(model) == ["norm0.out", "sigmoid0.out", "norm1.out", "sigmoid1.out"]
    assert any("leaves what the lm_head reads" in str(skip.reason) for skip in report.skips)
    assert relative(before, logits(model, tmp_path / "after")) < FLOAT32


def test_twice_is_once_and_one_more_free_rotation(llama_canonical: ir.Model, tmp_path: Path) -> None:
    from graphopt.verification.certificate.checker import check
    from graphopt.verification.equivalence import Verifier

    verifier = Verifier(tmp_path, {})
    verifier.start(llama_canonical)
    rotate(llama_canonical, **ALL)
    online, once = hadamards(llama_canonical), llama_canonical.clone()
    report = rotate(llama_canonical, seed=7, **ALL)
    assert hadamards(llama_canonical) == online
    assert any("rotated online already" in str(skip.reason) for skip in report.skips)
    moved = [str(change.what) for change in report.changes]
    assert len(moved) == 5 + 11 + 2 * 2
    assert check(once, llama_canonical, report.claims).status == "proved"
    assert verifier.check(llama_canonical, "rotate", "exact").figures["largest_change"] < FLOAT32


def test_what_is_quantized_already_is_left_alone_and_said(llama_canonical: ir.Model) -> None:
    from graphopt.passes.codes.quantize_weights import QuantizeWeights

    QuantizeWeights()(llama_canonical)
    report = rotate(llama_canonical)
    assert not report.changes
    assert any("rotate before weights are quantized" in str(skip.reason) for skip in report.skips)


def test_a_weight_between_two_bases_is_rounded_once() -> None:
    # w2 reads the hidden basis and writes the residual: both rotations meet in float64, and the result is rounded once.
    model = residual_model(width=16, inner=12, layers=1, gains=False)
    old = weights(model)["down0.weight"].astype(np.float64)
    from graphopt.numerics.rotations import HadamardRotation

    report = rotate(model, weight_inputs="hadamard")
    claim = next(claim for claim in report.claims.rotations.values() if claim.width == 16)
    turned = HadamardRotation(12, None).apply(HadamardRotation(16, claim.seed).apply(old, 1), 0)
    assert np.array_equal(weights(model)["down0.weight"], turned.astype(np.float32))


def digests() -> list[str]:
    """Return what rotations of each kind make of a small model."""
    made = []
    for kind in ("hadamard", "random"):
        model = residual_model(width=160, inner=96, gains=False)
        Rotate(seed=3, residual=kind, weight_inputs="hadamard")(model)  # type: ignore[arg-type]
        digest = hashlib.sha256()
        for value in model.graph.initializers.values():
            assert value.const_value is not None
            digest.update(value.const_value.numpy().tobytes())
        made.append(digest.hexdigest())
    return made


def test_a_seed_gives_the_same_bits_in_another_process() -> None:
    # On another number of threads as well: the library of linear algebra may sum in another order there.
    script = "from tests.passes.algebra.test_rotate import digests; print(*digests())"
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, cwd=ROOT, check=True
    )
    found = digests()
    assert done.stdout.split() == found
    assert len(set(found)) == 2


FAULTS = {
    # the weight at fault, and what the pass does wrong to it
    "a forgotten writer": ("model.layers.1.self_attn.o_proj", 1, lambda turn, array: array),
    "a forgotten reader": ("model.layers.0.mlp.up_proj", 0, lambda turn, array: array),
    "a transposed map": ("model.layers.1.mlp.down_proj", 0, lambda turn, array: inverse(turn, array)),
    "one flipped sign": ("lm_head", 0, lambda turn, array: turn(flipped(array))),
    "a wrong head": (
        "model.layers.0.self_attn.v_proj",
        1,
        lambda turn, array: np.roll(turn(np.roll(array, 8, 1)), -8, 1),
    ),
}


def inverse(turn: Callable[[np.ndarray], np.ndarray], array: np.ndarray) -> np.ndarray:
    """Apply the transposed map of the rows, which is not the map itself where the order is 20 times a power of two."""
    return turn(np.eye(len(array))).T @ array


def only_first_head(turned: np.ndarray, array: np.ndarray) -> np.ndarray:
    return np.concatenate([turned[:, :16], array[:, 16:]], axis=1)


def flipped(array: np.ndarray) -> np.ndarray:
    copy = array.copy()
    copy[7] *= -1
    return copy


@dataclasses.dataclass(frozen=True, eq=False)
class Faulty(Expression):
    """``wrong`` of a rotation and what it is applied to."""

    source: Expression
    turn: Callable[[Expression], Expression]
    wrong: Callable[..., np.ndarray]

    @property
    def dtype(self) -> ir.DataType:
        return self.source.dtype

    @property
    def shape(self) -> Shape:
        return self.source.shape

    def evaluate(self, region: Region) -> Array:
        return self.wrong(lambda array: self.turn(Inline.from_array(array)).numpy(), self.source.numpy())[region]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_pass_is_named_by_the_certificate_alone(
    fault: str, llama_canonical: ir.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    from graphopt.passes.algebra.rotate import fuser
    from graphopt.verification.certificate.checker import check

    culprit, axis, wrong = FAULTS[fault]
    right = fuser.Fuser.add

    def add(self: fuser.Fuser, site: WeightAxis, rotation: Rotation) -> ir.Value:
        weight = right(self, site, rotation)
        if site.node.name == f"{culprit}.MatMul" and site.axis == axis:
            self._steps[weight].append(partial(Faulty, turn=self._steps[weight].pop(), wrong=wrong))
        return weight

    monkeypatch.setattr(fuser.Fuser, "add", add)
    before = llama_canonical.clone()
    certificate = check(before, llama_canonical, rotate(llama_canonical, **ALL).claims)
    (finding,) = [finding for finding in certificate.findings if finding.status != "proved"]
    assert (certificate.status, finding.node) == ("failed", f"{culprit}.MatMul")
