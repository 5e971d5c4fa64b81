"""Where the native operators are: shared libraries beside this package, which onnxruntime loads by itself.

A session takes one of them: the library for GPUs registers the operators of the one for the CPU too, as onnxruntime
takes a domain from one library only.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphopt.util.targets import Device

NAMES: dict[Device, str] = {"cpu": "libgraphopt_ops.so", "cuda": "libgraphopt_ops_cuda.so"}

PATH_VARIABLE = "GRAPHOPT_OPS_LIBRARY"
"""Environment variable that names another build of the library; empty means no library."""

CUDA_PATH_VARIABLE = "GRAPHOPT_OPS_CUDA_LIBRARY"
"""The same of the library for GPUs."""


def library_path(device: Device = "cpu") -> Path | None:
    """Return the file of the native operators for a device, or ``None`` where they were not built.

    An editable install keeps the libraries in site-packages, not beside this file; the import system knows both places.
    """
    variable = os.environ.get(PATH_VARIABLE if device == "cpu" else CUDA_PATH_VARIABLE)
    if variable is not None:
        return Path(variable) if variable else None
    return _installed_path(device)


@cache
def _installed_path(device: Device) -> Path | None:
    file = files("graphopt.runtime_ops").joinpath(NAMES[device])
    return Path(str(file)) if file.is_file() else None


@cache
def library_function(path: str, name: str, *arguments: Any) -> Any | None:
    """Return a function of a library that tells by an int whether it ran; ``None`` where the library lacks it.

    Args:
        path: the library.
        name: of the function.
        arguments: its types of :mod:`ctypes`.
    """
    try:
        function = getattr(ctypes.CDLL(path), name)
    except (OSError, AttributeError):
        return None
    function.argtypes, function.restype = list(arguments), ctypes.c_int
    return function
