"""Pages of int1: codes 0 and 1, eight in a byte; scales as for int8."""

from __future__ import annotations

import numpy as np

from graphopt.runtime_ops.kv_attention.spec.storages.storage import Storage

STORAGE = Storage("int1", 9, np.dtype(np.uint8), bits=1, levels=1, has_kernel=True)
