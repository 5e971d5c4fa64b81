"""The ``graphopt`` command; each command is a function of a module of this folder."""

from graphopt.cli.entry import EXIT_CODES, app, main

__all__ = ["EXIT_CODES", "app", "main"]
