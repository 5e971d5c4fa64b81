"""The passes: one file or folder, one rewrite, in the folder of its phase. A new file is all that a new pass takes."""

from graphopt.passes.registry import PASSES

__all__ = ["PASSES"]
