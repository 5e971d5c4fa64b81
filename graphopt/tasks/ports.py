"""One input or output of a graph, as the graph or an onnxruntime session states it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import numpy.typing as npt

from graphopt.analysis.structure.ports import ATTENTION_MASK, BLOCK_TABLE, LOGITS, past_port

if TYPE_CHECKING:
    from collections.abc import Sequence

    import onnx_ir as ir
    import onnxruntime

IntArray = npt.NDArray[np.int64]
Array = npt.NDArray[np.generic]

# Tokens of a language model are 256 bytes at least.
_SMALLEST_VOCABULARY = 256

_DTYPES = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(double)": np.float64,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(uint8)": np.uint8,
    "tensor(int8)": np.int8,
    "tensor(int16)": np.int16,
    "tensor(uint16)": np.uint16,
    "tensor(uint32)": np.uint32,
    "tensor(uint64)": np.uint64,
    "tensor(bool)": np.bool_,
    "tensor(bfloat16)": ml_dtypes.bfloat16,
    "tensor(float8e4m3fn)": ml_dtypes.float8_e4m3fn,
}


@dataclass(frozen=True)
class Port:
    """One graph input or output: its name, its dtype, and its shape with ``None`` for a dimension that varies.

    ``symbols`` are the names of the dimensions, ``None`` where a dimension has none.
    """

    name: str
    dtype: np.dtype[np.generic] | None
    shape: tuple[int | None, ...]
    symbols: tuple[str | None, ...] = field(default=(), compare=False)


def port_of_value(value: ir.Value) -> Port:
    """Return the port that an input or output of a graph is."""
    dims: Sequence[object] = () if value.shape is None else tuple(value.shape)
    return Port(
        value.name or "",
        None if value.dtype is None else value.dtype.numpy(),
        tuple(dim if isinstance(dim, int) else _fixed_size(str(dim)) for dim in dims),
        tuple(getattr(dim, "value", None) for dim in dims),
    )


def port_of_node(node: onnxruntime.NodeArg) -> Port:
    """Return the port that an input or output of an onnxruntime session is."""
    dtype = _DTYPES.get(node.type)
    return Port(
        node.name,
        None if dtype is None else np.dtype(dtype),
        tuple(dim if isinstance(dim, int) else _fixed_size(str(dim)) for dim in node.shape),
        tuple(dim if isinstance(dim, str) else None for dim in node.shape),
    )


def _fixed_size(symbol: str) -> int | None:
    # The exporter writes a fixed dimension that it traced as symbolic as the symbol "8".
    return int(symbol) if symbol.isdigit() else None


def class_rank(inputs: Collection[str], outputs: Collection[str]) -> int | None:
    """Return the rank of the output ``logits`` where these are logits of classes: of texts 2, of tokens 3; else None.

    Args:
        inputs: the names of the inputs.
        outputs: the names of the outputs; the ports by name where their shapes are known.
    """
    port = outputs[LOGITS] if isinstance(outputs, Mapping) and LOGITS in outputs else None
    if port is None or BLOCK_TABLE in inputs or any(past_port(name) is not None for name in inputs):
        return None
    if len(port.shape) == 2:
        return 2
    # Heads of tokens are on encoders, whose batches are padded; a graph without a mask reads from left to right.
    is_small = len(port.shape) == 3 and port.shape[-1] is not None and port.shape[-1] < _SMALLEST_VOCABULARY
    return 3 if is_small and ATTENTION_MASK in inputs else None
