"""An honest case of each operator: the strategy in ``honest.py`` beside its tests."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

from hypothesis import strategies as st

from graphopt.numerics.rotations import hadamard
from tests.runtime_ops.hostile import Case, Tensor

HERE = Path(__file__).parent

FOLDERS = sorted(file.parent.name for file in HERE.glob("*/honest.py"))


def honest(folder: str) -> Callable[[], st.SearchStrategy[Case]]:
    """Return the strategy of the operator in a folder."""
    module = importlib.import_module(f"tests.runtime_ops.{folder}.honest")
    strategy: Callable[[], st.SearchStrategy[Case]] = module.honest
    return strategy


@st.composite
def batches(draw: st.DrawFn) -> tuple[int, ...]:
    return tuple(draw(st.lists(st.sampled_from([0, 1, 1, 2, 3, 9, 13]), max_size=3)))


def matrices(a: int, b: int, where: str = "graph") -> dict[str, Tensor]:
    return {"left": Tensor(hadamard(a), where), "right": Tensor(hadamard(b), where)}
