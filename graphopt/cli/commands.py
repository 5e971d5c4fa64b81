"""Which commands there are: a function marked with :func:`command` in any module of this folder is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from graphopt.util.registry import Registry

Function = TypeVar("Function", bound=Callable[..., None])

MARK = "graphopt_command"
"""The attribute that holds the name of a command."""


def command(name: str) -> Callable[[Function], Function]:
    """Make a function the command ``graphopt NAME``: its docstring is the help, its parameters are the options."""

    def mark(function: Function) -> Function:
        setattr(function, MARK, name)
        return function

    return mark


COMMANDS: Registry[Callable[..., None]] = Registry(
    "graphopt.cli", kind="command", name_of=lambda member: getattr(member, MARK, None)
)
"""Every command by its name: module by module, in the order of each file."""
