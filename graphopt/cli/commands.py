"""Which commands there are: a function marked with :func:`command` in any module of this folder is one."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import TypeVar

Function = TypeVar("Function", bound=Callable[..., None])

_NAME = "graphopt_command"


def command(name: str) -> Callable[[Function], Function]:
    """Make a function the command ``graphopt NAME``: its docstring is the help, its parameters are the options."""

    def mark(function: Function) -> Function:
        setattr(function, _NAME, name)
        return function

    return mark


def found_commands(package: str = "graphopt.cli") -> dict[str, Callable[..., None]]:
    """Return the commands by name: module by module, in the order of each file.

    Raises:
        ValueError: two functions have the same name.
    """
    found: dict[str, Callable[..., None]] = {}
    folder = importlib.import_module(package)
    for info in pkgutil.iter_modules(folder.__path__, f"{package}."):
        for each in vars(importlib.import_module(info.name)).values():
            name = getattr(each, _NAME, None)
            if name is None or each.__module__ != info.name:
                continue
            if name in found:
                raise ValueError(f"two commands are called {name}: in {found[name].__module__} and {info.name}")
            found[name] = each
    return found
