"""Pages of int8: codes from 0 to 255, keys with a scale per channel and page, values with one per token."""

from __future__ import annotations

import numpy as np

from graphopt.runtime_ops.kv_attention.spec.storages.storage import Storage

STORAGE = Storage("int8", 4, np.dtype(np.uint8), bits=8, levels=255, has_kernel=True, on_gpus=True)
