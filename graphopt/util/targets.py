"""Where a model runs: names that command lines, recipes and sessions share."""

from __future__ import annotations

from typing import Literal

Device = Literal["cpu", "cuda"]
"""What a session computes on; ``cuda`` is an NVIDIA GPU."""

Target = Literal["portable", "ort-cpu", "ort-cuda"]
"""What a model is made for; see the step ``lower``."""

InstructionSet = Literal["avx512", "avxvnni", "avx2", "i8mm", "dotprod", "neon", "scalar"]
"""A set of vector instructions that kernels are compiled for, the fastest first: three of x86, then three of ARM."""

ChosenTarget = Literal[
    "portable",
    "ort-cpu",
    "ort-cpu:avx512",
    "ort-cpu:avxvnni",
    "ort-cpu:avx2",
    "ort-cpu:i8mm",
    "ort-cpu:dotprod",
    "ort-cpu:neon",
    "ort-cpu:scalar",
    "ort-cuda",
]
"""A target as command lines and :func:`graphopt.optimize` take it: of a CPU also with its instruction set."""
