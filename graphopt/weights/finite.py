"""Weights that are NaN or infinite are refused before any work is done on them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir

from graphopt.errors import InputError


def check_finite(model: ir.Model, file: str | Path | None = None) -> None:
    """Read every floating-point weight once and refuse NaN and infinity.

    Args:
        model: the model.
        file: where it came from, for the message.

    Raises:
        InputError: a weight is not finite; names the tensor, its shape and the first bad index.
    """
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if tensor is None or not tensor.dtype.is_floating_point() or tensor.dtype.bitwidth < 16:
            continue
        # A mask constant may be -inf on purpose; a weight has at least one axis of some width.
        if tensor.size < 2:
            continue
        array = np.asarray(tensor.numpy(), dtype=np.float32 if tensor.dtype.bitwidth == 16 else None)
        finite = np.isfinite(array)
        if not finite.all():
            first = np.unravel_index(int(np.argmin(finite)), array.shape)
            raise InputError(
                f"weight has {int((~finite).sum())} value(s) that are NaN or infinite, "
                f"the first at index {[int(i) for i in first]}",
                file=file,
                tensor=name,
                shape=array.shape,
                remedy="the checkpoint is damaged or was converted with overflow; export it again",
            )
