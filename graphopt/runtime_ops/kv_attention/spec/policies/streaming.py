"""Each query reads the first and the newest tokens alone (StreamingLLM, Xiao et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from graphopt.runtime_ops.kv_attention.spec.policies.policy import Policy, parameter


@dataclass(frozen=True)
class Streaming(Policy):
    """The first ``sinks`` and the newest ``recent`` tokens.

    Attributes:
        compensate: whether heads that stream read one token more, the mean of those that they dropped (RazorAttention,
            Tang et al. 2024).
    """

    name: ClassVar[str] = "streaming"
    number: ClassVar[int] = 1
    has_kernel: ClassVar[bool] = True
    may_drop: ClassVar[bool] = True
    compensate: int = parameter(0, option=False, most=1)
