"""Pages of int4: codes from 0 to 15, two in a byte; scales as for int8."""

from __future__ import annotations

import numpy as np

from graphopt.runtime_ops.kv_attention.spec.storages.storage import Storage

STORAGE = Storage("int4", 5, np.dtype(np.uint8), bits=4, levels=15, has_kernel=True, on_gpus=True)
