"""Where the native operators are: one shared library beside this package, which onnxruntime loads by itself."""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path

NAME = "libgraphopt_ops.so"

PATH_VARIABLE = "GRAPHOPT_OPS_LIBRARY"
"""Environment variable that names another build of the library; empty, it says that there is none."""


def library_path() -> Path | None:
    """Return the file of the native operators, or ``None`` where they were not built: the bodies run then.

    An editable install keeps the library in site-packages, not beside this file; the import system knows both places.
    """
    other = os.environ.get(PATH_VARIABLE)
    if other is not None:
        return Path(other) if other else None
    file = files("graphopt.runtime_ops").joinpath(NAME)
    return Path(str(file)) if file.is_file() else None
