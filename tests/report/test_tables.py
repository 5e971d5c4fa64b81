from __future__ import annotations

import io

from rich.console import Console

from graphopt.artifact.hf_config import ModelFacts
from graphopt.artifact.manifest import FileRecord, Manifest, Precision, Source
from graphopt.graph.diagnostics import Change, Check, PassReport, Skip
from graphopt.passes.algebra.rotate import STAYS
from graphopt.passes.codes.spare_inputs import INPUT_ROUNDED
from graphopt.report.tables import passes_table, skips_table, summary
from tests.facts import SENTENCE

REPORT = PassReport(
    name="rotate",
    effect="exact",
    changes=[Change(where="w", what=SENTENCE(text="rotated"))] * 3,
    skips=[Skip(where=f"basis {n}", reason=SENTENCE(text="pinned")) for n in range(4)]
    + [Skip(where="basis x", reason=SENTENCE(text="observed"))],
    seconds=0.25,
)
MANIFEST = Manifest(
    source=Source(kind="onnx", name="m"),
    model=ModelFacts(),
    passes=[REPORT],
    checks=[
        Check(
            name="logits",
            after="rotate",
            status="measured",
            reason=SENTENCE(text="r"),
            figures={"largest_change": 1.5e-6},
        )
    ],
    precision=Precision(
        storage={"int4": 2, "float32": 1}, activations="int8", notes=[SENTENCE(text="rounded by the kernel")]
    ),
    notes=[SENTENCE(text="there is no tokenizer")],
    files={"model.onnx": FileRecord(bytes=1_500_000, sha256="0")},
)


def text_of(renderable: object) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_pass_is_shown_with_its_check() -> None:
    (row,) = [line for line in text_of(passes_table(MANIFEST)).splitlines() if "rotate" in line]
    assert [cell.strip() for cell in row.strip("│ ").split("│")] == [
        "rotate", "exact", "3", "5", "measured", "1.5e-06", "0.25",
    ]  # fmt: skip


def test_checks_stand_with_the_run_of_the_pass_that_they_are_about() -> None:
    names = ("fold_norms", "rotate", "rotate")
    figures = {("rotate", 2): 2e-6, ("fold_norms", 1): 3e-7, ("rotate", 1): 1e-6}
    checks = [
        Check(
            name="logits",
            after=name,
            run=run,
            status="measured",
            reason=SENTENCE(text="r"),
            figures={"largest_change": change},
        )
        for (name, run), change in figures.items()
    ]
    proof = Check(name="certificate", after="rotate", run=2, status="proved", reason=SENTENCE(text="p"))
    manifest = MANIFEST.model_copy(
        update={
            "passes": [
                PassReport(name=name, effect="exact", run=run) for name, run in zip(names, (1, 1, 2), strict=True)
            ],
            "checks": [*checks, proof],
        }
    )
    lines = text_of(passes_table(manifest)).splitlines()
    assert "3.0e-07" in next(line for line in lines if "fold_norms" in line)
    assert "1.0e-06" in next(line for line in lines if "rotate " in line and "(2)" not in line)
    second = next(number for number, line in enumerate(lines) if "rotate (2)" in line)
    assert "2.0e-06" in lines[second]
    assert {"measured", "proved"} <= set(" ".join(lines[second : second + 2]).split())


def test_the_node_that_is_the_reason_is_named() -> None:
    report = PassReport(
        name="rotate", effect="exact", skips=[Skip(where="x", reason=SENTENCE(text="pinned"), node="gate")] * 2
    )
    assert skips_table([report]).rows == [["rotate", "2", "x at gate", "pinned"]]


def test_a_basis_is_named_with_its_width() -> None:
    reason = STAYS(why=SENTENCE(text="pinned"), role="residual", width=64)
    report = PassReport(name="rotate", effect="exact", skips=[Skip(where="x", reason=reason, node="x")])
    ((_, _, example, _),) = skips_table([report]).rows
    assert example == "basis x [64]"


def test_equal_reasons_are_counted_and_none_is_lost() -> None:
    assert skips_table([REPORT]).rows == [
        ["rotate", "4", "basis 0", "pinned"],
        ["rotate", "1", "basis x", "observed"],
    ]


def test_each_place_is_a_row_where_they_are_not_folded() -> None:
    rows = skips_table([REPORT], is_folded=False).rows
    assert [row[1] for row in rows] == [*(f"basis {n}" for n in range(4)), "basis x"]


def test_reasons_that_differ_in_figures_alone_are_one_with_their_range() -> None:
    skips = [Skip(where=f"x{n}", reason=INPUT_ROUNDED(input=f"x{n}", error=n / 100)) for n in range(1, 6)]
    report = PassReport(name="spare_inputs", effect="exact", skips=skips)
    ((_, count, example, reason),) = skips_table([report]).rows
    assert (count, example) == ("5", "x1")
    assert "1.00% to 5.00%" in reason
    # up to three sentences of a kind stand on their own
    short_report = report.model_copy(update={"skips": skips[:3]})
    assert [row[2] for row in skips_table([short_report]).rows] == ["x1", "x2", "x3"]


def test_reasons_inside_reasons_tell_kinds_apart() -> None:
    reasons = [STAYS(why=SENTENCE(text=f"{n}"), role="residual", width=n) for n in range(1, 6)]
    reasons.append(STAYS(why=INPUT_ROUNDED(input="x", error=0.5), role="residual", width=6))
    skips = [Skip(where=f"x{n}", reason=reason) for n, reason in enumerate(reasons)]
    rows = skips_table([PassReport(name="rotate", effect="exact", skips=skips)]).rows
    assert [row[1] for row in rows] == ["5", "1"]


def test_nothing_left_alone_needs_no_table() -> None:
    assert skips_table([PassReport(name="rotate", effect="exact")]) is None


def test_storage_and_compute_precision_are_told_apart() -> None:
    text = "\n".join(summary(MANIFEST))
    assert "stored: 2 int4, 1 float32 tensor(s)" in text
    assert "computed: activations int8; rounded by the kernel" in text
    assert "note: there is no tokenizer" in text


def test_names_and_reasons_of_others_are_text() -> None:
    reason = SENTENCE(text="[red]pinned[/] by [/nothing]")
    report = PassReport(
        name="rotate", effect="exact", skips=[Skip(where="[/]", reason=reason, node="two\nlines" + "x" * 10_000)]
    )
    text = text_of(skips_table([report]))
    assert "[/] at" in text
    assert "two\\nlines" in text
    assert "[red]pinned[/] by [/nothing]" in text
    assert len(text.splitlines()) < 12


def test_a_step_that_changed_nothing_is_said_with_its_reason() -> None:
    def idle_notes(report: PassReport) -> list[str]:
        recipe = {"name": "r", "steps": [{"step": report.name}]}
        manifest = MANIFEST.model_copy(update={"passes": [REPORT, report], "recipe": recipe})
        return [line for line in summary(manifest) if "changed nothing" in line]

    skips = [Skip(where="a", reason=SENTENCE(text="it has no cache")), Skip(where="b", reason=SENTENCE(text="another"))]
    idle = PassReport(name="quantize_kv", effect="exact", skips=skips)
    assert idle_notes(idle) == ["note: the step quantize_kv changed nothing: it has no cache (2 reasons in all)"]
    assert not idle_notes(idle.model_copy(update={"changes": REPORT.changes}))
    # that a portable model keeps the standard form is no news
    assert not idle_notes(idle.model_copy(update={"name": "lower"}))
