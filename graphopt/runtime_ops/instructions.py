"""Which set of vector instructions graphopt's kernels use on this machine."""

from __future__ import annotations

import ctypes
import os
import platform
from functools import lru_cache
from pathlib import Path
from typing import Any, cast, get_args

from graphopt.errors import InputError
from graphopt.runtime_ops.library import library_path
from graphopt.util.targets import InstructionSet

ISA_VARIABLE = "GRAPHOPT_OPS_ISA"
"""Environment variable that names the set that kernels are held to."""

_AVX2 = frozenset({"avx2", "fma", "f16c"})
_NEON = frozenset({"asimd"})
# As abi/instructions.cc asks for them, by the names that Linux gives them; the fastest set first.
_NEEDS: dict[InstructionSet, frozenset[str]] = {
    "avx512": _AVX2 | {"avx512f", "avx512dq", "avx512bw", "avx512vl", "avx512_vnni", "avx512vbmi", "avx512_bf16"},
    "avxvnni": _AVX2 | {"avx_vnni"},
    "avx2": _AVX2,
    "i8mm": _NEON | {"asimddp", "i8mm"},
    "dotprod": _NEON | {"asimddp"},
    "neon": _NEON,
    "scalar": frozenset(),
}
_OF_MACHINES: dict[str, InstructionSet] = {"x86_64": "avx2", "AMD64": "avx2", "aarch64": "neon", "arm64": "neon"}
_CPUINFO = Path("/proc/cpuinfo")


def instructions_here() -> InstructionSet:
    """Return the set that kernels use in this process: what ``GRAPHOPT_OPS_ISA`` names, else the fastest there is.

    The library of kernels says it. Where it was not built, the processor's flags do, as Linux lists them. Where they
    cannot be read either, it is ``avx2`` on x86-64, ``neon`` on 64-bit ARM and ``scalar`` elsewhere.

    Raises:
        InputError: ``GRAPHOPT_OPS_ISA`` names an unknown set, or one that the library or this machine lacks.
    """
    library = library_path()
    ask = None if library is None else _function_of(str(library))
    variable = os.environ.get(ISA_VARIABLE)
    if ask is not None:
        name = ask()
        instructions = None if name is None else name.decode()
    elif variable:
        instructions = variable if variable in get_args(InstructionSet) else None
    else:
        instructions = _by_flags(_flags(_CPUINFO))
    if instructions is None:
        raise InputError(
            f"{ISA_VARIABLE} is {variable!r}, which this machine does not have",
            remedy=f"unset it, or name one of {', '.join(get_args(InstructionSet))} that the machine has",
        )
    return cast("InstructionSet", instructions)


@lru_cache(maxsize=4)
def _function_of(library: str) -> Any:
    """Return the function of a library that says it; ``None`` for an older version without one, or no library."""
    try:
        function = ctypes.CDLL(library).graphopt_instructions
    except (OSError, AttributeError):
        return None
    function.argtypes, function.restype = [], ctypes.c_char_p
    return function


@lru_cache(maxsize=4)
def _flags(cpuinfo: Path) -> frozenset[str] | None:
    """Return the flags of the first processor that Linux lists; ``None`` where there is no such list."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    # x86 calls them flags, ARM features
    fields = (line.partition(":") for line in lines)
    return next((frozenset(flags.split()) for name, _, flags in fields if name.strip() in ("flags", "Features")), None)


def _by_flags(flags: frozenset[str] | None) -> InstructionSet:
    if flags is None:
        return _OF_MACHINES.get(platform.machine(), "scalar")
    return next(name for name, features in _NEEDS.items() if features <= flags)
