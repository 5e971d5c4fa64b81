from __future__ import annotations

from graphopt.analysis.bases.search import find_bases
from graphopt.report.bases import describe, lines
from tests.decoders import decoder
from tests.graphs import residual_model, run_pass


def test_a_free_basis_names_its_weights() -> None:
    reports = {report.role: report for report in map(describe, find_bases(residual_model(gains=False).graph))}
    residual = reports["residual"]
    assert (residual.verdict, residual.width, residual.node) == ("free", 16, None)
    assert residual.writers == ["embedding", "down0", "down1"]
    assert residual.readers == ["up0", "up1", "head"]
    assert reports["weight_input"].verdict == "at run time"


def test_lines_say_what_pins_a_basis_and_why() -> None:
    text = "\n".join(
        lines([describe(basis) for basis in find_bases(residual_model(residual_output=True, gains=False).graph)])
    )
    assert "embedding.out [16]  residual, 3 writer(s), 3 reader(s): not to be rotated\n    residual1.out: " in text
    assert "it is a graph output" in text


def test_bases_of_layers_that_are_alike_are_said_once() -> None:
    model = decoder(12)
    run_pass(model, "fold_norms")
    graph = model.graph
    reports = [describe(basis) for basis in find_bases(graph)]
    text = lines(reports, graph)
    assert len(reports) > 12 * 5
    assert len(text) <= 12
    assert sum("(x 12, layers 0-11)" in line for line in text) >= 5
    assert any(line.startswith("embedding.out [32]  residual, 25 writer(s), 61 reader(s): for free") for line in text)
