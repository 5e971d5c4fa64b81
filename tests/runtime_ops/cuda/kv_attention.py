"""KVAttention by its CUDA kernels through their C interface, in the host interpreter or on a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from graphopt.runtime_ops.kv_attention.spec.attributes import STORAGES, KVAttributes
from tests.runtime_ops.cuda.interface import TYPES, Buffer, check

_COUNTS = ("rows", "columns", "kv_heads", "group", "size", "page", "pages")
_TOKENS = ("sink_pages", "recent_pages", "window", "sinks", "recent", "budget", "channels")
_POINTERS = ("policies", "past", "fresh", "query", "key", "value", "sink_logits", "sink_query")
_STATE = ("keys", "values", "scales", "slots", "summaries")


class Call(ctypes.Structure):
    """``GraphoptKVAttention`` of ``kv_attention/cuda/interface.h``."""

    _fields_ = [
        ("type", ctypes.c_int32),
        ("storage", ctypes.c_int32),
        *((name, ctypes.c_int64) for name in (*_COUNTS, *_TOKENS)),
        *((name, ctypes.c_float) for name in ("mass", "scale", "softcap", "clip")),
        *((name, ctypes.c_int32) for name in ("mean", "compensate", "chunks")),
        *((name, ctypes.c_void_p) for name in (*_POINTERS, *_STATE, "y", "scratch")),
        ("list_bytes", ctypes.c_size_t),
    ]


class Kernels:
    """Runs the operator by its CUDA kernels; call it as the reference.

    Args:
        library: the C interface.
        seed: of the order in which the interpreter runs threads.
        dtype: of query, key, value, `sink_query` and y, which is returned as float32.
        list_bytes: that lists of pages may take at a time; 0 for as many as the kernels choose.
        sm90a: whether the interpreter runs kernels that only sm_90a has; a GPU chooses by itself.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        seed: int = 0,
        dtype: Any = np.float32,
        list_bytes: int = 0,
        *,
        sm90a: bool = False,
    ) -> None:
        self.library, self.seed, self.dtype, self.list_bytes = library, seed, np.dtype(dtype), list_bytes
        self.sm90a = sm90a

    def __call__(self, *inputs: np.ndarray, **attributes: Any) -> Sequence[np.ndarray]:
        attrs = KVAttributes(**attributes)
        query, key, value, past, new, sink_logits, sink_query, *state = inputs
        rows, columns, width = key.shape
        call = Call(type=TYPES[self.dtype], storage=STORAGES.index(attrs.storage), list_bytes=self.list_bytes)
        call.rows, call.columns, call.group, call.size = rows, columns, query.shape[2] // width, width // attrs.kv_heads
        call.page, call.pages, call.mean = attrs.page, state[0].shape[2], attrs.summary == "mean"
        for name in ("kv_heads", *_TOKENS, "mass", "scale", "softcap", "clip", "compensate", "chunks"):
            setattr(call, name, getattr(attrs, name))
        on_host: dict[str, np.ndarray] = {
            "policies": np.array([attrs.policy(head) for head in range(attrs.kv_heads)], np.uint8),
            "past": np.ascontiguousarray(past, np.int64),
            "fresh": np.ascontiguousarray(new, np.int64),
        }
        for name, array in on_host.items():
            setattr(call, name, array.ctypes.data)
        activations = {"query": query, "key": key, "value": value, "sink_query": sink_query}
        on_device = {name: array.astype(self.dtype) for name, array in activations.items()}
        on_device |= {"sink_logits": sink_logits, **dict(zip(_STATE, state, strict=True))}
        on_device["y"] = np.full(query.shape, np.nan, self.dtype)
        buffers = {name: Buffer(self.library, array) for name, array in on_device.items()}
        for name, buffer in buffers.items():
            is_given = on_device[name].size or name not in ("sink_query", "sink_logits")
            setattr(call, name, buffer.pointer if is_given else None)
        if not self.library.on_gpu:
            self.library.graphopt_interpreter_seed(self.seed)
            self.library.graphopt_interpreter_sm90a(self.sm90a)  # scratch depends on which kernel it is
        size = self.library.graphopt_cuda_kv_attention_scratch(ctypes.byref(call))
        scratch = Buffer(self.library, np.full(size, 0xFF, np.uint8))
        call.scratch = scratch.pointer
        check(self.library.graphopt_cuda_kv_attention(ctypes.byref(call), None))
        return [buffers["y"].numpy().astype(np.float32), *(buffers[name].numpy() for name in _STATE)]
