"""The rounding methods: one file each. A new file is all that a new method takes."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping

from graphopt.quantization.rounding.method import RoundingMethod


def found_methods() -> dict[str, type[RoundingMethod]]:
    """Return the methods in the files of this folder, by name.

    Raises:
        ValueError: two have the same name.
    """
    found: dict[str, type[RoundingMethod]] = {}
    for info in pkgutil.iter_modules(__path__, f"{__name__}."):
        for each in vars(importlib.import_module(info.name)).values():
            if isinstance(each, type) and issubclass(each, RoundingMethod) and each.__module__ == info.name:
                name = each.model_fields["method"].default
                if name in found:
                    raise ValueError(f"two rounding methods are called {name}: {found[name]} and {each}")
                found[name] = each
    return found


METHODS: dict[str, type[RoundingMethod]] = found_methods()
"""Every rounding method by the name that recipes call it."""


def method_of(given: object) -> object:
    """Return the rounding method that a recipe names, alone (``gptq``) or with options (``{method: gptq, ...}``).

    Raises:
        ValueError: there is none of that name, or it has no such options.
    """
    if isinstance(given, str):
        given = {"method": given}
    if not isinstance(given, Mapping):
        return given
    name = given.get("method")
    if name not in METHODS:
        raise ValueError(f"there is no rounding method {name!r}; known are {', '.join(METHODS)}")
    return METHODS[name].model_validate(given)
