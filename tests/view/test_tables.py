from __future__ import annotations

import io

from rich.console import Console

from graphopt.facts import Change, Check, PassReport, Skip
from graphopt.manifest import FileRecord, Manifest, ModelFacts, Precision, Source
from graphopt.view.tables import passes_table, skips_table, summary

REPORT = PassReport(
    name="rotate",
    effect="exact",
    changes=[Change(where="w", what="rotated")] * 3,
    skips=[Skip(where=f"basis {n}", reason="pinned") for n in range(4)] + [Skip(where="basis x", reason="observed")],
    seconds=0.25,
)
MANIFEST = Manifest(
    source=Source(kind="onnx", name="m"),
    model=ModelFacts(),
    passes=[REPORT],
    checks=[Check(name="logits", after="rotate", status="measured", reason="r", figures={"largest_change": 1.5e-6})],
    precision=Precision(storage={"int4": 2, "float32": 1}, activations="int8", note="rounded by the kernel"),
    notes=["there is no tokenizer"],
    files={"model.onnx": FileRecord(bytes=1_500_000, sha256="0")},
)


def shown(renderable: object) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_pass_is_shown_with_its_check() -> None:
    (row,) = [line for line in shown(passes_table(MANIFEST)).splitlines() if "rotate" in line]
    assert [cell.strip() for cell in row.strip("│ ").split("│")] == [
        "rotate", "exact", "3", "5", "measured", "1.5e-06", "0.25",
    ]  # fmt: skip


def test_equal_reasons_are_counted_and_none_is_lost() -> None:
    text = shown(skips_table([REPORT]))
    assert "basis 0 and 3 more" in text
    assert "observed" in text


def test_nothing_left_alone_needs_no_table() -> None:
    assert skips_table([PassReport(name="rotate", effect="exact")]) is None


def test_storage_and_compute_precision_are_told_apart() -> None:
    text = "\n".join(summary(MANIFEST))
    assert "stored: 2 int4, 1 float32 tensor(s)" in text
    assert "computed: activations int8; rounded by the kernel" in text
    assert "note: there is no tokenizer" in text
