"""Pages of int2: codes from 0 to 3, four in a byte; scales as for int8."""

from __future__ import annotations

import numpy as np

from graphopt.runtime_ops.kv_attention.spec.storages.storage import Storage

STORAGE = Storage("int2", 8, np.dtype(np.uint8), bits=2, levels=3, has_kernel=True)
