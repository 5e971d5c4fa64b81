"""What stands in for recurrences of transformers, run by the NumPy references of our operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphopt.models import recurrent_calls
from graphopt.runtime_ops import OPERATORS


def run_by_reference(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let operators that are placed in a trace compute at once; return the list that their names are put into."""
    names = []

    def operator(name: str, inputs: list[Any], _: Any, **attributes: Any) -> tuple[Any, ...]:
        names.append(name)
        outputs = OPERATORS[name].reference(*(tensor.detach().numpy() for tensor in inputs), **attributes)
        return tuple(torch.from_numpy(output) for output in outputs)

    monkeypatch.setattr(recurrent_calls, "_operator", operator)
    return names
