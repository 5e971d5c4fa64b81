from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console

from graphopt.analysis.structure.heads import Calibration, HeadFigures, LayerFigures, ReadPolicy
from graphopt.report.heads import heads_table, policies_table


def calibration(policy: ReadPolicy, layers: Sequence[LayerFigures]) -> Calibration:
    figures = {"tokens": 1, "window": 1, "queries": 1, "block": 1, "repeats": 4}
    return Calibration(origin="a", model="m", **figures, policies={"streaming": policy}, layers=tuple(layers))


def test_the_tables_show_every_head_and_policy() -> None:
    head = HeadFigures(induction=(0.1, 0.75), echo=(0.0, 0.25), kept={"streaming": (0.5, 0.625)})
    policy = ReadPolicy(attributes={"policy": "streaming", "sinks": 4}, read=0.25, kept=0.5625)
    head_calibration = calibration(policy, [LayerFigures(number=3, heads=(head,))])
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(heads_table(head_calibration))
    console.print(policies_table(head_calibration))
    text = console.export_text()
    # the largest of the scores of its query heads, and the mean of what they keep
    for word in ("3", "0.750", "0.250", "0.562", "sinks 4", "25.0%", "56.2%"):
        assert word in text


def head(score: float) -> HeadFigures:
    return HeadFigures(induction=(score, 0.0), echo=(0.01, 0.0), kept={"streaming": (0.5, 1.0)})


def test_layers_without_a_retrieval_head_are_one_row() -> None:
    layers = [LayerFigures(number=number, heads=(head(0.02), head(0.03))) for number in range(32)]
    layers[20] = LayerFigures(number=20, heads=(head(0.05), head(0.9)))
    table = heads_table(calibration(ReadPolicy(attributes={}, read=0.25, kept=0.5), layers))
    assert [tuple(row) for row in table.rows] == [
        ("0-19", "40 others", "0.030", "0.010", "0.750"),
        ("20", "1", "0.900", "0.010", "0.750"),
        ("20", "1 others", "0.050", "0.010", "0.750"),
        ("21-31", "22 others", "0.030", "0.010", "0.750"),
    ]
