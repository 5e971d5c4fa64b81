"""The benchmark of recurrences: both engines compute the definition, and each count of tokens has its times."""

from __future__ import annotations

import pytest

from tests.native import needs_library
from tools.bench import recurrence

pytestmark = needs_library


def test_both_engines_are_checked_and_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(recurrence.SHAPES, "small", (4, 2, 16, 32))
    recurrence.main(
        tokens="1,6", shape="small", rule="gated_delta", per_channel=True, layers=2, seconds=0.01, threads=1
    )
    head, *rows = capsys.readouterr().out.splitlines()
    assert head == "small (4, 2, 16, 32), gated_delta per channel, 1 threads"
    assert [row.split()[0] for row in rows] == ["1", "6"]
    assert all(float(word) > 0 for row in rows for word in row.split()[3:6:2])


@pytest.mark.parametrize("rule", ["linear", "gated_delta"])
def test_a_scan_and_what_it_becomes_are_compared_and_timed(
    rule: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(recurrence.SHAPES, "small", (4, 4, 16, 32))
    recurrence.main(tokens="6", shape="small", rule=rule, seconds=0.01, threads=1, scan=True)
    (row,) = capsys.readouterr().out.splitlines()[1:]
    assert [word for word in row.split() if not word[0].isdigit()] == ["tokens", "Scan", "graphopt", "x"]
    assert all(float(word) > 0 for word in row.split()[3:6:2])
