"""Artifacts that were written once still load, run, say the same and verify; see ``frozen/README.md``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from graphopt.artifact import artifact
from graphopt.compile.replay import verify
from graphopt.compile.same_manifest import LEFT_OUT
from graphopt.inference.generation import generate
from graphopt.inference.session import load

FROZEN = Path(__file__).parent / "frozen"

# Relative to the largest logit. Floats: other processors add in another order, 1e-7 for each of some tens of sums.
# Codes: where a number lies halfway between two codes, such a difference decides, and one step of int8 is 1/127 of the
# largest input of a product, of int4 (caches) 1/15 of the range of one channel. A format that was read wrongly moves
# the logits by about 1.
BOUNDS = {"before": 1e-5, "rotate": 1e-5, "packed": 5e-2, "dynamic": 2e-2}


@pytest.mark.parametrize("native", [True, False], ids=["kernels", "bodies"])
@pytest.mark.parametrize("name", BOUNDS)
def test_it_still_says_what_it_said(name: str, native: bool) -> None:
    expected = np.load(FROZEN / f"{name}.npz")
    logits = load(FROZEN / name, native=native).logits(expected["ids"])[0]
    assert np.abs(logits - expected["logits"]).max() <= BOUNDS[name] * np.abs(expected["logits"]).max()


@pytest.mark.parametrize("name", ["before", "rotate"])
def test_it_still_generates_what_it_generated(name: str) -> None:
    expected = np.load(FROZEN / f"{name}.npz")
    session = load(FROZEN / name)
    prompt = session.decode([int(token) for token in expected["ids"][0, :20]])
    (completion,) = generate(session, [prompt], max_new_tokens=len(expected["generated"]))
    assert completion.tokens == expected["generated"].tolist()


@pytest.mark.parametrize("name", BOUNDS)
def test_it_still_opens_and_its_files_are_whole(name: str) -> None:
    artifact.verify_files(FROZEN / name)
    frozen = artifact.read(FROZEN / name)
    assert "tokenizer.json" in frozen.companions


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("rotate", [("certificate", "proved"), ("replay", "proved"), ("logits", "measured")]),
        ("packed", [("certificate", "proved"), ("replay", "proved"), ("logits", "measured")]),
        ("dynamic", [("replay", "proved"), ("logits", "measured")]),
    ],
)
def test_it_still_verifies(name: str, expected: list[tuple[str, str]]) -> None:
    proof = verify(FROZEN / "before", FROZEN / name)
    assert [(check.name, check.status) for check in proof.checks] == expected
    # the replay says what it did not compare
    (finding,) = next(check for check in proof.checks if check.name == "replay").findings
    assert finding.status == "not covered"
    assert all(f"{pattern} ({reason})" in str(finding.reason) for pattern, reason in LEFT_OUT.items())
