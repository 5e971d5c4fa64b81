"""Pages of int6: codes from 0 to 63, in planes of 4 and of 2 bits; scales as for int8."""

from __future__ import annotations

import numpy as np

from graphopt.runtime_ops.kv_attention.spec.storages.storage import Storage

STORAGE = Storage("int6", 6, np.dtype(np.uint8), bits=6, levels=63, has_kernel=True)
