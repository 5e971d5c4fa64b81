"""Print the registers, shared memory and spills of each CUDA kernel; there must be no spills.

Every ``.cu`` file of ``graphopt/runtime_ops`` is compiled for sm_80 and sm_90a with the options of the library's
CMakeLists.txt and every warning as an error; ``ptxas`` reports the figures. Shared memory is the static one; our
kernels' is dynamic, and given at the launch. No GPU is needed::

    python tools/release/cuda_resources.py [FILE ...]

Exits 1 where a kernel spills or a file does not compile, 2 where there is no nvcc.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

OPERATORS = Path(__file__).parents[2] / "graphopt" / "runtime_ops"
ARCHITECTURES = ("sm_80", "sm_90a")
OPTIONS = ["-std=c++17", "-O3", "-fmad=false", f"-I{OPERATORS}", "-Werror", "all-warnings"]
OPTIONS += ["-Xcompiler", "-Wall,-Wextra,-fno-exceptions,-fno-rtti", "-Xptxas", "-v"]

_KERNEL = re.compile(
    r"Compiling entry function '(?P<name>\w+)' for '(?P<architecture>\w+)'"
    r".*?(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
    r".*?Used (?P<registers>\d+) registers(?:[^\n]*?(?P<shared>\d+) bytes smem)?",
    re.DOTALL,
)


@dataclass(frozen=True)
class Resources:
    """The resources of a kernel on one architecture.

    Attributes:
        kernel: its name, demangled.
        architecture: such as ``sm_90a``.
        registers: of a thread.
        spill_bytes: bytes that a thread stores and loads again for want of registers.
        stack: bytes of a thread's local memory, the spilled ones among them.
        shared_bytes: bytes of static shared memory of a block.
    """

    kernel: str
    architecture: str
    registers: int
    spill_bytes: int
    stack: int
    shared_bytes: int


def resources_of(output: str) -> list[Resources]:
    """Return the resources of each kernel in the output of ``ptxas -v``."""
    rows = []
    for match in _KERNEL.finditer(output):
        number = {name: int(match[name] or 0) for name in ("registers", "stores", "loads", "stack", "shared")}
        spill_bytes = number["stores"] + number["loads"]
        sizes = (number["registers"], spill_bytes, number["stack"], number["shared"])
        rows.append(Resources(demangle(match["name"]), match["architecture"], *sizes))
    return rows


def demangle(name: str) -> str:
    """Return a kernel's readable name, without namespaces and arguments; the raw name without c++filt."""
    tool = shutil.which("c++filt")
    if tool is None:
        return name
    readable_name = subprocess.run([tool, name], capture_output=True, text=True, check=True).stdout.strip()
    readable_name = readable_name.removeprefix("void ").replace("graphopt::", "").replace("(anonymous namespace)::", "")
    return re.sub(r"\((?!int\)|bool\)|unsigned)[^()]*\)$", "", readable_name)


def compile_one(nvcc: str, source: Path, folder: Path) -> list[Resources]:
    """Compile one file for each architecture.

    Raises:
        SystemExit: it does not compile, or nvcc warns of it.
    """
    codes = [f"-gencode=arch={name.replace('sm', 'compute')},code={name}" for name in ARCHITECTURES]
    command = [nvcc, *OPTIONS, *codes, "-c", str(source), "-o", str(folder / f"{source.stem}.o")]
    result = subprocess.run(command, capture_output=True, text=True)
    output = result.stderr + result.stdout
    if result.returncode:
        sys.exit(f"{source}: nvcc refuses it\n{output}")
    rows = resources_of(output)
    if len(rows) != output.count("Compiling entry function"):
        sys.exit(f"{source}: the output of ptxas for its kernels cannot be parsed\n{output}")
    return rows


def main(arguments: list[str]) -> int:
    """Print a row for each kernel; return the exit code."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        print("there is no nvcc on the path", file=sys.stderr)
        return 2
    sources = [Path(argument) for argument in arguments] or sorted(OPERATORS.rglob("*.cu"))
    spills = 0
    print(f"{'registers':>9} {'spilled':>8} {'stack':>6} {'shared':>7}  {'for':5}  kernel")
    with tempfile.TemporaryDirectory(prefix="graphopt-") as folder:
        for source in sources:
            for row in compile_one(nvcc, source.resolve(), Path(folder)):
                spills += row.spill_bytes > 0
                figures = (
                    f"{row.registers:9} {row.spill_bytes:8} {row.stack:6} {row.shared_bytes:7}  {row.architecture:5}"
                )
                print(f"{figures}  {source.parent.name}: {row.kernel}", flush=True)
    if spills:
        print(f"{spills} kernels spill registers", file=sys.stderr)
    return 1 if spills else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
