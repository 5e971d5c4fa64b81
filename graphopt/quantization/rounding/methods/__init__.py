"""The rounding methods: one file each. A new file is all that a new method takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graphopt.quantization.rounding.method import RoundingMethod
from graphopt.util.registry import Registry


def _name_of(member: Any) -> str | None:
    is_method = isinstance(member, type) and issubclass(member, RoundingMethod)
    return str(member.model_fields["method"].default) if is_method else None


METHODS: Registry[type[RoundingMethod]] = Registry(__name__, kind="rounding method", name_of=_name_of)
"""Every rounding method by the name that recipes call it."""


def method_of(choice: object) -> object:
    """Return the rounding method that a recipe names, alone (``gptq``) or with options (``{method: gptq, ...}``).

    Raises:
        ValueError: there is none of that name, or it has no such options.
    """
    if isinstance(choice, str):
        choice = {"method": choice}
    if not isinstance(choice, Mapping):
        return choice
    name = str(choice.get("method"))
    if name not in METHODS:
        raise ValueError(f"there is no rounding method {name!r}; known are {', '.join(METHODS)}")
    return METHODS[name].model_validate(choice)
