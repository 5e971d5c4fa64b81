from __future__ import annotations

import pytest

from tests.native import needs_library
from tools.bench import experts

pytestmark = needs_library


@pytest.mark.parametrize("format", ["int4", "fp6-e2m3"])
def test_engines_compute_the_same_mixture_and_are_timed(format: str, capsys: pytest.CaptureFixture[str]) -> None:
    experts.main(tokens="1,5", experts=4, hidden=64, inner=32, top=2, format=format, layers=2, rounds=2, threads=1)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["1"] * 3 + ["5"] * 3
    assert all("1.00 x" in line for line in lines if experts.GRAPHOPT in line)


def test_an_engine_that_computes_something_else_is_refused() -> None:
    import numpy as np

    y = np.ones((2, 3))
    experts.confirm("exact", y, y)
    with pytest.raises(SystemExit, match="half is off by 5.0e-01 of the largest number"):
        experts.confirm("half", y / 2, y)
