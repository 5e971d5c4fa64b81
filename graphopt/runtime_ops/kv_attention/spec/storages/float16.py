"""Pages of float16."""

from __future__ import annotations

import numpy as np

from graphopt.runtime_ops.kv_attention.spec.storages.storage import Storage

STORAGE = Storage(
    "float16", 1, np.dtype(np.float16), bits=16, significant=11, exponent=-14, has_kernel=True, on_gpus=True
)
