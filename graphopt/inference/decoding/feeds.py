"""What a step is fed besides its cache: bound once, and written where it lies while its shape stays the same.

Binding an input takes longer than writing the few numbers of a single token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from graphopt.ort.session import ort_value

if TYPE_CHECKING:
    from collections.abc import Mapping

    import onnxruntime

Array = npt.NDArray[Any]


class Feeds:
    """The inputs of a binding that come from the host.

    Args:
        binding: where they are bound.
        in_place: whether the graph reads the memory of the host, so that what is written there later is seen. A GPU has
            a copy, which is made when an input is bound.
    """

    def __init__(self, binding: onnxruntime.IOBinding, *, in_place: bool) -> None:
        self._binding, self._in_place = binding, in_place
        self._bound: dict[str, Array] = {}

    def bind(self, feeds: Mapping[str, Array]) -> None:
        """Let the next run read ``feeds``."""
        for name, array in feeds.items():
            target = self._bound.get(name)
            if target is not None and target.shape == array.shape and target.dtype == array.dtype:
                target[...] = array
                continue
            numbers = np.array(array, order="C")
            if not self._in_place:
                self._binding.bind_cpu_input(name, numbers)
                continue
            self._binding.bind_ortvalue_input(name, ort_value(numbers))
            self._bound[name] = numbers
