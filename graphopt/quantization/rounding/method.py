"""The contract of a rounding method: how it chooses codes, scales and zero points of one weight."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from graphopt.numerics.formats.format import Format
    from graphopt.quantization.rounding.nearest import QuantizedMatrix
    from graphopt.quantization.rounding.scales import Scale

Need = Literal["hessian"]
"""What a method may need besides the weight: ``hessian`` is X^T X of the inputs X [tokens, rows] of the product."""


class RoundingMethod(BaseModel, abc.ABC):
    """A rounding method with its options; a recipe names it by ``method``.

    A subclass is one file in :mod:`graphopt.quantization.rounding.methods`. It gives ``method`` its name as a
    ``Literal``, adds
    options as fields, says what statistics it needs, and implements :meth:`round`. It is part of the content hash of
    the weights it makes, so the same options must always choose the same codes, in any process.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: str

    @property
    def needs(self) -> Need | None:
        """The statistics of the weight's inputs that :meth:`round` takes; ``None`` for none."""
        return None

    @abc.abstractmethod
    def round(
        self,
        matrix: npt.NDArray[np.float32],
        format: Format,
        group: int,
        scale: Scale,
        *,
        scale_type: npt.DTypeLike,
        statistics: npt.NDArray[Any] | None,
    ) -> QuantizedMatrix:
        """Choose codes, scales and zero points.

        Args:
            matrix: [rows, columns], rows are what a product sums over.
            format: the format; any.
            group: rows that share a scale; the last group may have fewer.
            scale: how the scale of a group is chosen.
            scale_type: the floating type that scales are stored in; codes are chosen for the stored scale.
            statistics: what :attr:`needs` names, for this weight: a Hessian is float32 or float64 [rows, rows].
                ``None`` for a method that needs nothing.

        Raises:
            GraphoptError: codes cannot be chosen; says why.
        """
