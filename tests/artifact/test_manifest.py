from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from graphopt.artifact.hf_config import ModelFacts
from graphopt.artifact.manifest import Manifest, ProductCount, Source, read_manifest
from graphopt.graph.diagnostics import TEXT, Change, Check, PassReport
from graphopt.report.tables import passes_table, skips_table, summary

FROZEN = Path(__file__).parents[1] / "verification" / "frozen"


def manifest_of(runs: list[tuple[str, int]], checks: list[tuple[str, str, int]]) -> Manifest:
    return Manifest(
        source=Source(kind="onnx", name="m"),
        model=ModelFacts(),
        passes=[PassReport(name=name, effect="exact", run=run) for name, run in runs],
        checks=[
            Check(name=name, after=after, run=run, status="measured", reason=TEXT(text=f"{name} {number}"))
            for number, (name, after, run) in enumerate(checks)
        ],
    )


@pytest.mark.parametrize("name", ["dynamic", "packed", "rotate"])
def test_a_manifest_from_before_facts_had_codes_is_read_and_shown(name: str) -> None:
    written = json.loads((FROZEN / name / "manifest.json").read_text())
    manifest = read_manifest(FROZEN / name)
    changes = [change for report in written["passes"] for change in report["changes"]]
    assert [str(change.what) for report in manifest.passes for change in report.changes] == [
        change["what"] for change in changes
    ]
    assert {change.what.code for report in manifest.passes for change in report.changes} == {"text"}
    assert [check.run for check in manifest.checks if check.name == "logits"] == [1] * len(manifest.passes)
    assert manifest.precision is not None
    assert "; ".join(map(str, manifest.precision.notes)) == written["precision"]["note"]
    assert {f"{each.operator}, inputs {each.activations}": each.count for each in manifest.precision.products} == (
        written["precision"]["products"]
    )
    console = Console(width=200, record=True)
    for table in (passes_table(manifest), skips_table(manifest.passes)):
        console.print(table)
    assert all(report.name in console.export_text(clear=False) for report in manifest.passes)
    assert [line.removeprefix("note: ") for line in summary(manifest) if line.startswith("note: ")] == written["notes"]


def test_the_note_that_every_write_replaces_is_known_by_its_older_words() -> None:
    manifest = manifest_of([], []).model_dump(mode="json")
    manifest["notes"] = ["no genai_config.json: its caches lie in pages", "no tokenizer was carried along"]
    notes = Manifest.model_validate(manifest).notes
    assert [note.code for note in notes] == ["artifact.no-genai-config", "text"]
    assert str(notes[0]) == "no genai_config.json: its caches lie in pages"


def test_a_manifest_comes_back_as_it_was_written() -> None:
    manifest = manifest_of([("fold_norms", 1), ("rotate", 1), ("rotate", 2)], [("logits", "rotate", 2)])
    manifest.passes[0].changes.append(Change(where="a", what=TEXT(text="b")))
    assert Manifest.model_validate_json(manifest.model_dump_json()) == manifest


def test_runs_of_a_pass_without_numbers_are_numbered_in_order() -> None:
    manifest = manifest_of([("rotate", 0), ("lower", 0), ("rotate", 0)], [("logits", "rotate", 0)] * 2)
    assert [report.run for report in manifest.passes] == [1, 1, 2]
    assert [str(check.reason) for check in manifest.checks_of(manifest.passes[2])] == ["logits 1"]
    assert manifest.checks_of(manifest.passes[1]) == []


def test_a_check_is_found_by_its_name_and_by_what_it_is_about() -> None:
    manifest = manifest_of(
        [("rotate", 1), ("rotate", 2), ("lower", 1)],
        [("logits", "rotate", 1), ("logits", "lower", 1), ("logits", "rotate", 2), ("kernels", "the recipe", 0)],
    )
    assert str(manifest.check("logits").reason) == "logits 2"
    assert str(manifest.check("logits", after="lower").reason) == "logits 1"
    assert manifest.check("kernels").run == 0
    with pytest.raises(LookupError, match=r"no check proof after lower .* logits after rotate"):
        manifest.check("proof", after="lower")


def test_products_by_name_become_counts() -> None:
    manifest = manifest_of([], []).model_dump(mode="json")
    manifest["precision"] = {
        "storage": {},
        "activations": "int8",
        "note": "as by default",
        "products": {"MatMulDynamic, inputs int4 per token": 4},
    }
    precision = Manifest.model_validate(manifest).precision
    assert precision is not None
    assert precision.products == [ProductCount(operator="MatMulDynamic", activations="int4 per token", count=4)]
