from __future__ import annotations

from graphopt.analysis.bases import find_bases
from graphopt.view.bases import describe, lines
from tests.graphs import residual_model


def test_a_free_basis_names_its_weights() -> None:
    reports = {report.role: report for report in map(describe, find_bases(residual_model(gains=False).graph))}
    residual = reports["residual"]
    assert (residual.verdict, residual.width, residual.node) == ("free", 16, None)
    assert residual.writers == ["embedding", "down0", "down1"]
    assert residual.readers == ["up0", "up1", "head"]
    assert reports["weight_input"].verdict == "at run time"


def test_lines_say_what_pins_a_basis_and_why() -> None:
    text = "\n".join(lines([describe(basis) for basis in find_bases(residual_model(observed=True, gains=False).graph)]))
    assert "embedding.out [16]  residual, 3 writer(s), 3 reader(s): not to be rotated\n    residual1.out: " in text
    assert "it is a graph output" in text
