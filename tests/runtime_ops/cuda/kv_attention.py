"""KVAttention by its CUDA kernels through their C interface, in the host interpreter."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from graphopt.runtime_ops.kv_attention.attributes import STORAGES, KVAttributes

TYPES = {"float32": (1, np.float32), "float16": (10, np.float16), "bfloat16": (16, ml_dtypes.bfloat16)}
"""Of activations: what ONNX counts the type as, and NumPy's."""

_COUNTS = ("rows", "columns", "kv_heads", "group", "size", "page", "pages")
_TOKENS = ("sink_pages", "recent_pages", "window", "sinks", "recent", "budget", "channels")
_POINTERS = ("policies", "past", "fresh", "query", "key", "value", "sink_logits", "sink_query")
_STATE = ("keys", "values", "scales", "slots", "summaries")


class Call(ctypes.Structure):
    """``GraphoptKVAttention`` of ``kv_attention/cuda_interface.h``."""

    _fields_ = [
        ("type", ctypes.c_int32),
        ("storage", ctypes.c_int32),
        *((name, ctypes.c_int64) for name in (*_COUNTS, *_TOKENS)),
        *((name, ctypes.c_float) for name in ("mass", "scale", "softcap")),
        *((name, ctypes.c_int32) for name in ("mean", "compensate")),
        *((name, ctypes.c_void_p) for name in (*_POINTERS, *_STATE, "y", "scratch")),
        ("list_bytes", ctypes.c_size_t),
    ]


class Interpreted:
    """Runs the operator by its CUDA kernels; call it as the reference.

    Args:
        library: the C interface.
        seed: of the order in which threads run.
        type: of the query, key, value and y.
        list_bytes: that lists of pages may take at a time; 0 for as many as the kernels choose.
    """

    def __init__(self, library: ctypes.CDLL, seed: int = 0, type: str = "float32", list_bytes: int = 0) -> None:
        self.library, self.seed, self.type, self.list_bytes = library, seed, type, list_bytes

    def __call__(self, *inputs: np.ndarray, **attributes: Any) -> Sequence[np.ndarray]:
        attrs = KVAttributes(**attributes)
        query, key, value, past, new, sink_logits, sink_query, *state = inputs
        number, dtype = TYPES[self.type]
        rows, columns, width = key.shape
        size = width // attrs.kv_heads
        after = [aligned(tensor) for tensor in state]
        y = aligned(np.full(query.shape, np.nan, dtype))
        policies = np.array([attrs.policy(head) for head in range(attrs.kv_heads)], np.uint8)
        kept = {
            "policies": policies,
            "past": np.ascontiguousarray(past, np.int64),
            "fresh": np.ascontiguousarray(new, np.int64),
            **{name: aligned(x.astype(dtype)) for name, x in (("query", query), ("key", key), ("value", value))},
            "sink_logits": aligned(sink_logits) if sink_logits.size else None,
            "sink_query": aligned(sink_query.astype(dtype)) if sink_query.size else None,
        }
        call = Call(type=number, storage=STORAGES.index(attrs.storage), rows=rows, columns=columns, size=size)
        call.group, call.page, call.pages = query.shape[2] // max(width, 1), attrs.page, state[0].shape[2]
        for name in ("kv_heads", *_TOKENS, "mass", "scale", "softcap", "compensate"):
            setattr(call, name, min(getattr(attrs, name), 2**63 - 1))
        call.list_bytes = self.list_bytes
        call.mean = attrs.summary == "mean"
        for name, tensor in (*kept.items(), *zip(_STATE, after, strict=True), ("y", y)):
            setattr(call, name, tensor.ctypes.data if tensor is not None else None)
        size_of = self.library.graphopt_cuda_kv_attention_scratch
        size_of.restype = ctypes.c_size_t
        scratch = aligned(np.full(size_of(ctypes.byref(call)), 0xFF, np.uint8))
        call.scratch = scratch.ctypes.data
        self.library.graphopt_interpreter_seed(self.seed)
        failure = self.library.graphopt_cuda_kv_attention(ctypes.byref(call), None)
        if failure is not None:
            raise RuntimeError(failure.decode())
        return [y.astype(np.float32), *after]


def aligned(array: np.ndarray) -> np.ndarray:
    """Return a copy at a multiple of 16 bytes that ends where its memory ends."""
    memory = np.empty(array.nbytes + 16, np.uint8)
    start = -memory.ctypes.data % 16
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy
