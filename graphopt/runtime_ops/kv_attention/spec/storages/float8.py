"""Pages of float8 (E4M3FN, Micikevicius et al. 2022), without scales; the type has no infinity."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from graphopt.runtime_ops.kv_attention.spec.storages.storage import Storage

LARGEST = 448.0

STORAGE = Storage(
    "float8",
    3,
    np.dtype(ml_dtypes.float8_e4m3fn),
    bits=8,
    significant=4,
    exponent=-6,
    largest=LARGEST,
    has_kernel=True,
    on_gpus=True,
)
