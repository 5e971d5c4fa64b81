"""What tools/bench/gpu.py times: one call of a CUDA operator, and its rivals on torch tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

CaseFilter = Callable[[str], bool]
"""Whether to build the case of a name: its tensors take time and memory."""


def all_cases(name: str) -> bool:
    """Select every case."""
    del name
    return True


@dataclass(frozen=True)
class Case:
    """One problem, with as many copies of its tensors as the L2 cache does not hold.

    Attributes:
        name: what is computed, with its sizes.
        bytes_moved: bytes that a call must read and write at least.
        copies: how many copies of the tensors there are; a call is given the one to use.
        poison: fills the output of a copy with NaN.
        run: computes one copy on torch's current stream.
        error: relative error of a copy's output against float64, in the norm.
        tolerance: the largest error that rounding explains.
        rivals: by name, other code for the same problem, or a bound such as a plain copy.
    """

    name: str
    bytes_moved: int
    copies: int
    poison: Callable[[int], None]
    run: Callable[[int], None]
    error: Callable[[int], float]
    tolerance: float
    rivals: Mapping[str, Callable[[int], Any]] = field(default_factory=dict)


def copies_past_l2(torch: Any, device: str, bytes_of_one: int) -> int:
    """Return how many copies of a problem take twice the L2 cache of the current GPU; at least 2, and 2 elsewhere."""
    if device != "cuda":
        return 2
    l2 = int(torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size)
    return max(2, -(-2 * l2 // max(bytes_of_one, 1)))


def stream_of(torch: Any, device: str) -> int:
    """Return torch's current stream as the C interface takes it; 0 where the host interpreter computes."""
    return 0 if device != "cuda" else int(torch.cuda.current_stream().cuda_stream)
