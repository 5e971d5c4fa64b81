"""Each fault is found in a graph that has it and in no other, and what mends it does."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from typer.testing import CliRunner

from graphopt.artifact.artifact import read
from graphopt.cli import app
from graphopt.compile.doctor import diagnose, mend
from graphopt.compile.doctor.doctor import recipe_of
from graphopt.compile.doctor.examination import EXAMINATIONS
from graphopt.compile.doctor.examinations.float_products import weight_bytes
from graphopt.compile.pipeline import optimize
from graphopt.compile.replay import verify
from graphopt.errors import InputError
from graphopt.inference.decoding.decoder import Decoder
from graphopt.inference.session import load
from graphopt.passes import PASSES
from tests.compile.doctor import planted_models
from tests.passes.lift.canonicalize.recurrences.common import attention

DOCS = Path(__file__).parents[3] / "docs" / "doctor.md"
TOLERANCE = 0.2
"""How far bytes that were expected may be from those that come out: the file also holds names and shapes."""

ROUNDING = 0.02
"""How far rounding inputs to int8 in groups of 32 moves one product: 1/254 of a group's largest, over 128 rows."""


def scan(path: Path) -> Path:
    ir.save(attention(delta=True, gated=False).scan(), path)
    return path


def codes(**options: object) -> Callable[[Path], Path]:
    return lambda path: planted_models.products_with_codes(path, **options)  # type: ignore[arg-type]


REMEDIES: dict[str, tuple[Callable[[Path], Path], float]] = {
    "accuracy-level": (codes(), ROUNDING),
    "accuracy-level, 8 bits": (codes(bits=8, level=1), ROUNDING),
    "float-zero-points": (codes(bits=2, zeros="whole", level=4), ROUNDING),
    "float-zero-points, 4 bits": (codes(bits=4, zeros="whole", level=4), ROUNDING),
    "repeated-weights": (planted_models.repeated_products, 0),
    "runtime-constants": (planted_models.computed_constants, 0),
    "float64": (planted_models.doubles, 1e-5),  # float32 rounding of sums of 128 numbers
    "cast-circles": (planted_models.casts, 0),
    "unfused-products": (planted_models.transposed_codes, ROUNDING),
    "recurrence-in-loop": (scan, 1e-5),  # the kernel sums in another order
}


@pytest.mark.parametrize("case", REMEDIES)
def test_what_mends_a_fault_is_proved_or_measured(case: str, tmp_path: Path) -> None:
    make, bound = REMEDIES[case]
    code = case.split(",")[0]
    file = make(tmp_path / "model.onnx")
    before = diagnose(file)
    assert code in [symptom.code for symptom in before.faults]
    assert {symptom.code for symptom in before.faults} <= {code, "accuracy-level"}
    result = mend(file, tmp_path / "mended")
    assert result.after.faults == []
    assert result.figures["largest_change"] <= bound
    assert all(check.status in ("proved", "measured", "not covered") for check in result.checks)
    outputs = [check for check in result.checks if check.name == "outputs"]
    assert {check.status for check in outputs} == {"measured"}
    for check in outputs:
        if PASSES[check.after].effect == "exact":
            assert check.figures["largest_change"] < 1e-4
    expected = result.before.bytes_saved
    if expected:  # of constants to the byte; of files, which also hold names, shapes and the history of nodes, nearly
        assert weight_bytes(ir.load(file).graph) - weight_bytes(read(tmp_path / "mended").model.graph) == expected
        assert result.before.bytes - result.after.bytes == pytest.approx(expected, rel=TOLERANCE)
    assert result.seconds_before is not None
    assert verify(file, tmp_path / "mended").checks[0].status == "proved"


@pytest.mark.parametrize(
    ("code", "make"),
    [
        ("float-products", codes(level=4, rest_columns=512)),
        ("float-experts", planted_models.experts),
        ("not-finite", planted_models.not_finite),
    ],
)
def test_what_the_doctor_leaves_to_others(code: str, make: Callable[[Path], Path], tmp_path: Path) -> None:
    file = make(tmp_path / "model.onnx")
    (symptom,) = diagnose(file).symptoms
    assert (symptom.code, symptom.level, symptom.steps) == (code, "fault", [])
    with pytest.raises(InputError, match="no pass mends what is found"):
        mend(file, tmp_path / "mended")
    assert not (tmp_path / "mended").exists()


def test_operators_without_a_kernel_are_a_hint(tmp_path: Path) -> None:
    diagnosis = diagnose(planted_models.body(tmp_path / "model.onnx"))
    assert [(s.code, s.level, s.nodes) for s in diagnosis.symptoms] == [("missing-kernels", "hint", ["swish"])]
    assert (diagnosis.faults, diagnosis.notes) == ([], [])


def test_products_of_our_own_are_examined_too(tmp_path: Path) -> None:
    """Their kernels take constants alone."""
    optimize(planted_models.repeated_products(tmp_path / "model.onnx"), "fp6-rtn", tmp_path / "fp6", quality_tokens=0)
    diagnosis = diagnose(tmp_path / "fp6")
    assert diagnosis.notes == []


def test_exports_have_no_fault(
    llama_artifact: Path, make_artifact: Callable[[str], Path], shipped_artifact: Path, tmp_path: Path
) -> None:
    for folder in (llama_artifact, make_artifact("mixtral"), make_artifact("bert"), shipped_artifact):
        diagnosis = diagnose(folder)
        assert diagnosis.faults == []
        assert {symptom.code for symptom in diagnosis.symptoms} <= {"copied-caches"}
        assert diagnosis.notes == []
    (hint,) = diagnose(llama_artifact).symptoms
    assert (hint.code, hint.level, len(hint.nodes)) == ("copied-caches", "hint", 4)
    decoder = Decoder(load(llama_artifact, threads=1), 1)
    decoder.step(np.zeros((1, 64), np.int64))
    assert hint.fact.figures["megabytes"] == pytest.approx(decoder.states.bytes * (1024 // 64) / 1e6)
    healthy = planted_models.products_with_codes(tmp_path / "healthy.onnx", level=4)
    assert diagnose(healthy).symptoms == []
    with pytest.raises(InputError, match="nothing is wrong with this file"):
        mend(healthy, tmp_path / "mended")


def test_zero_points_between_codes_stay(tmp_path: Path) -> None:
    file = planted_models.products_with_codes(tmp_path / "model.onnx", zeros="between", level=4)
    (symptom,) = diagnose(file).symptoms
    assert (symptom.code, symptom.bytes_saved) == ("float-zero-points", 0)
    result = mend(file, tmp_path / "mended")
    assert [symptom.code for symptom in result.after.faults] == ["float-zero-points"]


def test_a_file_that_is_not_run_is_read(tmp_path: Path) -> None:
    diagnosis = diagnose(planted_models.transposed_codes(tmp_path / "model.onnx"), run=False)
    assert diagnosis.symptoms == []
    assert [note.code for note in diagnosis.notes] == ["doctor.not-run"]


def test_an_examination_that_fails_is_named(tmp_path: Path) -> None:
    file = planted_models.products_with_codes(
        tmp_path / "model.onnx", bits=8, zeros="whole", level=4
    )  # no kernel for it
    diagnosis = diagnose(file)
    assert [symptom.code for symptom in diagnosis.symptoms] == ["float-zero-points"]
    assert [note.figures.get("name") for note in diagnosis.notes] == ["not-finite"]


def test_an_old_opset_is_raised_first() -> None:
    assert [step.name for step in recipe_of(["share_weights"], 17).steps] == ["canonicalize", "share_weights"]
    assert [step.name for step in recipe_of(["share_weights"], 23).steps] == ["share_weights"]


def test_the_page_has_a_heading_for_each_code() -> None:
    headings = re.findall(r"^## (\S+)$", DOCS.read_text("utf-8"), re.MULTILINE)
    assert sorted(headings) == sorted(EXAMINATIONS)
    assert {step for kind in EXAMINATIONS.values() for step in kind.steps} <= set(PASSES)


def test_the_command_ends_with_one_where_there_is_a_fault(tmp_path: Path) -> None:
    file = planted_models.repeated_products(tmp_path / "model.onnx")
    result = CliRunner().invoke(app, ["doctor", str(file), "--json"])
    assert result.exit_code == 1
    (symptom,) = json.loads(result.stdout)["symptoms"]
    assert (symptom["code"], symptom["bytes_saved"]) == ("repeated-weights", 131072)
    result = CliRunner().invoke(app, ["doctor", str(file), "--fix", str(tmp_path / "mended")])
    assert (result.exit_code, "0.26 MB became 0.13 MB, 0.13 MB less were expected" in result.stdout) == (0, True)
    result = CliRunner().invoke(app, ["doctor", str(tmp_path / "mended")])
    assert (result.exit_code, "nothing is wrong" in result.stdout) == (0, True)
    assert CliRunner().invoke(app, ["doctor", str(file), "--fix", "x", "--no-run"]).exit_code != 0


def test_numbers_beyond_float32_stay_in_float64(tmp_path: Path) -> None:
    import onnx

    file = planted_models.doubles(tmp_path / "model.onnx")
    model = onnx.load(file)
    wide = onnx.numpy_helper.to_array(model.graph.initializer[0]).copy()
    wide[0, 0] = 1e300
    model.graph.initializer[0].CopyFrom(
        planted_models.constant("weight", np.ascontiguousarray(wide * (np.abs(wide) > 1)))
    )
    onnx.save(model, file)
    graph = ir.load(file)
    report = PASSES["single_precision"]()(graph).report
    assert [skip.reason.code for skip in report.skips] == ["single_precision.out-of-range"]
    assert graph.graph.initializers["weight"].const_value is not None
    assert graph.graph.initializers["weight"].const_value.dtype == ir.DataType.DOUBLE
