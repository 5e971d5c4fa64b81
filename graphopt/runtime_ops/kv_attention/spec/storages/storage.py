"""What a storage of caches states about itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Storage:
    """How the numbers of keys and values are stored.

    Attributes:
        name: what the attribute ``storage`` calls it.
        number: its place in the kernels' tables of storages; never given to another one.
        dtype: of the tensors of pages.
        bits: of a stored number.
        levels: the largest code of a storage of integers, whose pages have scales; ``None`` for floats.
        significant: significant bits of a float, the implied one included; ``None`` where nothing is rounded, or where
            scales say by how much.
        exponent: of the least normal number of such a float.
        largest: numbers beyond it, infinity included, are stored as it; ``None`` where the type has an infinity.
        has_kernel: whether it is one of ``GRAPHOPT_STORAGES`` or ``GRAPHOPT_CPU_STORAGES``; else a model with such a
            cache runs by bodies.
        on_gpus: whether GPUs have kernels for it too.
    """

    name: str
    number: int
    dtype: np.dtype[Any]
    bits: int
    levels: int | None = None
    significant: int | None = None
    exponent: int = 0
    largest: float | None = None
    has_kernel: bool = False
    on_gpus: bool = False

    @property
    def planes(self) -> tuple[int, ...]:
        """Bits of the planes that codes are stored in, the lowest bits first; each divides 8."""
        return {6: (4, 2), 3: (2, 1)}.get(self.bits, (self.bits,))

    @property
    def unit(self) -> int:
        """Neighbouring codes of what is summed over that are packed together; sizes are multiples of it."""
        return 4 * 8 // min(self.planes)

    def elements(self, numbers: int) -> int:
        """Return how many elements of :attr:`dtype` so many numbers take."""
        return numbers * self.bits // (8 * self.dtype.itemsize)
