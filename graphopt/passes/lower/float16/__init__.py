"""The graph computes in float16: half the bytes, and the type that the matrix units of GPUs are made for."""

from graphopt.passes.lower.float16.float16 import Float16

__all__ = [
    "Float16",
]
