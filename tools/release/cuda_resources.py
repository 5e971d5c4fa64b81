"""What each CUDA kernel takes of a GPU: registers, shared memory, and what it spills, which must be nothing.

Every ``.cu`` file of ``graphopt/runtime_ops`` is compiled for sm_80 and sm_90a as the library's CMakeLists.txt says,
with every warning as an error, and ``ptxas`` is asked. Shared memory is what a kernel states at compile time; ours is
dynamic, and said at the launch. No GPU is needed::

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
    """What a kernel takes for one architecture.

    Attributes:
        kernel: its name, demangled.
        architecture: such as ``sm_90a``.
        registers: of a thread.
        spilled: bytes that a thread stores and loads again for want of registers.
        stack: bytes of a thread's local memory, the spilled ones among them.
        shared: bytes of static shared memory of a block.
    """

    kernel: str
    architecture: str
    registers: int
    spilled: int
    stack: int
    shared: int


def resources_of(said: str) -> list[Resources]:
    """Return what ``ptxas -v`` reports for each kernel."""
    found = []
    for match in _KERNEL.finditer(said):
        number = {name: int(match[name] or 0) for name in ("registers", "stores", "loads", "stack", "shared")}
        spilled = number["stores"] + number["loads"]
        sizes = (number["registers"], spilled, number["stack"], number["shared"])
        found.append(Resources(demangled(match["name"]), match["architecture"], *sizes))
    return found


def demangled(name: str) -> str:
    """Return a kernel's readable name, without namespaces and arguments; the raw name without c++filt."""
    tool = shutil.which("c++filt")
    if tool is None:
        return name
    whole = subprocess.run([tool, name], capture_output=True, text=True, check=True).stdout.strip()
    whole = whole.removeprefix("void ").replace("graphopt::", "").replace("(anonymous namespace)::", "")
    return re.sub(r"\((?!int\)|bool\)|unsigned)[^()]*\)$", "", whole)


def compile_one(nvcc: str, source: Path, folder: Path) -> list[Resources]:
    """Compile one file for each architecture.

    Raises:
        SystemExit: it does not compile, or nvcc warns of it.
    """
    codes = [f"-gencode=arch={name.replace('sm', 'compute')},code={name}" for name in ARCHITECTURES]
    command = [nvcc, *OPTIONS, *codes, "-c", str(source), "-o", str(folder / f"{source.stem}.o")]
    done = subprocess.run(command, capture_output=True, text=True)
    said = done.stderr + done.stdout
    if done.returncode:
        sys.exit(f"{source}: nvcc refuses it\n{said}")
    found = resources_of(said)
    if len(found) != said.count("Compiling entry function"):
        sys.exit(f"{source}: the output of ptxas for its kernels cannot be parsed\n{said}")
    return found


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
                spills += row.spilled > 0
                figures = f"{row.registers:9} {row.spilled:8} {row.stack:6} {row.shared:7}  {row.architecture:5}"
                print(f"{figures}  {source.parent.name}: {row.kernel}", flush=True)
    if spills:
        print(f"{spills} kernels spill registers", file=sys.stderr)
    return 1 if spills else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
