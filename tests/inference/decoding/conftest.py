from __future__ import annotations

from collections.abc import Iterator

import pytest

from graphopt.inference.decoding import step_costs as costs


@pytest.fixture(scope="module")
def costs_are_measured_briefly() -> Iterator[None]:
    """Run each width of a step once: the first round finds those that give other bits, and no test looks at times."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(costs, "_ROUNDS", (1, 1))
        yield
