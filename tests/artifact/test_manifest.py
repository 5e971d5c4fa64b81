from __future__ import annotations

import pytest

from graphopt.artifact.hf_config import ModelFacts
from graphopt.artifact.manifest import Manifest, Source
from graphopt.graph.diagnostics import Change, Check, PassReport
from tests.facts import SENTENCE


def manifest_of(runs: list[tuple[str, int]], checks: list[tuple[str, str, int]]) -> Manifest:
    return Manifest(
        source=Source(kind="onnx", name="m"),
        model=ModelFacts(),
        passes=[PassReport(name=name, effect="exact", run=run) for name, run in runs],
        checks=[
            Check(name=name, after=after, run=run, status="measured", reason=SENTENCE(text=f"{name} {number}"))
            for number, (name, after, run) in enumerate(checks)
        ],
    )


def test_a_manifest_comes_back_as_it_was_written() -> None:
    manifest = manifest_of([("fold_norms", 1), ("rotate", 1), ("rotate", 2)], [("logits", "rotate", 2)])
    manifest.passes[0].changes.append(Change(where="a", what=SENTENCE(text="b")))
    assert Manifest.model_validate_json(manifest.model_dump_json()) == manifest


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
