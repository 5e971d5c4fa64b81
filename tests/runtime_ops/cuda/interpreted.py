"""Builds kernels for the host interpreter: .cu files as plain C++, with ``interpreter/host.h`` in the place of CUDA.

Each source is compiled once for its contents and those of all headers, into ``build/interpreted``; the sanitizers of
``make test-native`` are used where ``GRAPHOPT_SANITIZE`` is set.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[3]
OPERATORS = ROOT / "graphopt" / "runtime_ops"
INTERPRETER = [Path(__file__).parent / "interpreter" / f"{name}.cc" for name in ("fiber", "host", "host_matrix")]
FLAGS = ["-std=c++17", "-O1", "-fPIC", "-ffp-contract=off", "-fno-exceptions", "-fno-rtti", "-fvisibility=hidden"]
WARNINGS = ["-Wall", "-Wextra", "-Werror"]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g1"]


def build(name: str, sources: Sequence[Path], compiler: str) -> Path:
    """Return a library of ``sources`` and the interpreter; only what changed since the last time is compiled.

    Raises:
        AssertionError: the compiler refuses a source, or warns of it.
    """
    flags = [*FLAGS, *WARNINGS, *(SANITIZERS if os.environ.get("GRAPHOPT_SANITIZE") else []), f"-I{OPERATORS}"]
    flags += [f"-I{INTERPRETER[0].parents[1]}"]
    flags.append("-DGRAPHOPT_INTERPRETED")
    known = hashlib.sha256(" ".join([compiler, *flags]).encode())
    for header in sorted([*OPERATORS.rglob("*.h"), *INTERPRETER[0].parent.glob("*.h")]):
        known.update(header.read_bytes())
    folder = ROOT / "build" / "interpreted"
    folder.mkdir(parents=True, exist_ok=True)
    objects = {}
    for source in [*INTERPRETER, *sources]:
        made = known.copy()
        made.update(str(source).encode() + source.read_bytes())
        objects[folder / f"{source.parent.name}-{source.stem}-{made.hexdigest()[:16]}.o"] = source
    # processes of the same tests share the work: what another one compiles is waited for at the end
    for wait in (False, True):
        for made, source in objects.items():
            _run([compiler, *flags, "-c", "-x", "c++", source], made, wait)
    library = folder / f"{name}-{hashlib.sha256(' '.join(map(str, objects)).encode()).hexdigest()[:16]}.so"
    _run([compiler, *flags, "-shared", "-Wl,--no-undefined", *objects], library, wait=True)
    return library


def _run(command: Sequence[str | Path], output: Path, wait: bool) -> None:
    """Run a compiler unless its output is there; it appears whole, or not at all.

    Where another process makes it, this returns at once, or waits for it.
    """
    if output.exists():
        return
    with output.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return
        if not output.exists():
            unfinished = output.with_name(f"unfinished-{output.name}")
            said = subprocess.run([*command, "-o", unfinished], capture_output=True, text=True)
            assert said.returncode == 0, said.stderr
            unfinished.replace(output)


def load(library: Path) -> ctypes.CDLL:
    """Return the library; by default each of its functions returns null or an error message."""

    class Function(ctypes._CFuncPtr):  # type: ignore[name-defined]
        _flags_ = ctypes._FUNCFLAG_CDECL  # type: ignore[attr-defined]
        _restype_ = ctypes.c_char_p

    loaded = ctypes.CDLL(str(library))
    loaded._FuncPtr = Function
    if hasattr(loaded, "graphopt_interpreter_seed"):  # a library for GPUs has no interpreter
        loaded.graphopt_interpreter_seed.argtypes = [ctypes.c_uint64]
        loaded.graphopt_interpreter_sm90a.argtypes = [ctypes.c_bool]
    return loaded


def sources() -> list[Path]:
    """Return the sources of the library for GPUs, as its ``CMakeLists.txt`` finds them."""
    folder = OPERATORS / "cuda"
    patterns = re.search(r"file\(GLOB sources CONFIGURE_DEPENDS (.+?)\)", (folder / "CMakeLists.txt").read_text(), re.S)
    assert patterns
    # pathlib takes no "..": a pattern of a folder beside this one starts from the one above
    found = [
        file
        for pattern in patterns[1].split()
        for file in (OPERATORS.glob(pattern[3:]) if pattern.startswith("../") else folder.glob(pattern))
    ]
    return sorted(found)


def compiler() -> str | None:
    """Return a C++ compiler, or ``None`` where there is none."""
    return shutil.which("c++")
