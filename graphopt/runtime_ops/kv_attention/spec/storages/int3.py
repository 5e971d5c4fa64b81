"""Pages of int3: codes from 0 to 7, in planes of 2 bits and of 1; scales as for int8."""

from __future__ import annotations

import numpy as np

from graphopt.runtime_ops.kv_attention.spec.storages.storage import Storage

STORAGE = Storage("int3", 7, np.dtype(np.uint8), bits=3, levels=7, has_kernel=True)
