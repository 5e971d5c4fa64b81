"""Pages of float32: numbers as they come."""

from __future__ import annotations

import numpy as np

from graphopt.runtime_ops.kv_attention.spec.storages.storage import Storage

STORAGE = Storage("float32", 0, np.dtype(np.float32), bits=32, has_kernel=True, on_gpus=True)
