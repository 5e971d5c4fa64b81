"""ARM processors that QEMU emulates, and the library whose kernels run on them; ``make emulated`` builds it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

PROCESSORS = {"cortex-a72": "neon", "neoverse-n1": "dotprod", "max": "i8mm"}
"""Names that QEMU gives them, and the fastest set of instructions that each has."""

BUILT = Path(__file__).parents[3] / "build" / "emulated"
"""Where ``make emulated`` puts the library for ARM, the program that loads it, and the library for onnxruntime here."""

BRIDGE = BUILT / "bridge.so"
NEEDS = ("qemu-aarch64", "aarch64-linux-gnu-g++")


def lacking() -> str | None:
    """Return why no kernel can be emulated here, or ``None``."""
    missing = [program for program in NEEDS if shutil.which(program) is None]
    if missing:
        return f"there is no {' and no '.join(missing)}: Debian's packages are qemu-user and g++-aarch64-linux-gnu"
    if not BRIDGE.is_file():
        return "kernels for ARM are not built for the emulator: `make emulated` does"
    return None


def command(processor: str) -> str:
    """Return what ``GRAPHOPT_EMULATOR`` must say for one of ``PROCESSORS``."""
    library = BUILT / "graphopt" / "runtime_ops" / "libgraphopt_ops.so"
    root = os.environ.get("QEMU_LD_PREFIX", "/usr/aarch64-linux-gnu")
    return f"qemu-aarch64 -cpu {processor} -L {root} {BUILT / 'guest'} {library}"
