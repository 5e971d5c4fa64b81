"""Pages of bfloat16."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from graphopt.runtime_ops.kv_attention.spec.storages.storage import Storage

STORAGE = Storage(
    "bfloat16", 2, np.dtype(ml_dtypes.bfloat16), bits=16, significant=8, exponent=-126, has_kernel=True, on_gpus=True
)
