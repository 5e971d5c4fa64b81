"""One registry for all that is one file of a kind: passes, rounding methods, operators, storages, commands."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Registry(Mapping[str, T], Generic[T]):
    """What the modules and packages directly in some folders define, by name; searched when it is first used.

    A new file in a folder is all that a new member takes. Folders are read in the order given, their modules in the
    order of their names, members in the order of each file; ``order`` sorts afterwards. A package defines what its
    ``__init__`` re-exports from modules inside of it.

    Args:
        folders: the dotted names of the folders.
        kind: what a member is, for errors: "pass".
        name_of: the name of a member; ``None`` for an object of a module that is no member. A class or function that
            a module imports from elsewhere is none either.
        order: sorts the members by name.
        part: the module inside of each package that is read in its place, such as ``spec.op``; packages without it and
            plain modules then define nothing.
    """

    def __init__(
        self,
        *folders: str,
        kind: str,
        name_of: Callable[[Any], str | None],
        order: Callable[[dict[str, T]], Mapping[str, T]] = dict,
        part: str = "",
    ) -> None:
        self._folders, self._kind, self._name_of, self._order, self._part = folders, kind, name_of, order, part
        self._members: Mapping[str, T] | None = None

    def search(self) -> dict[str, T]:
        """Return the members that are in the folders now, unsorted.

        Raises:
            ValueError: two members have the same name; names both modules.
        """
        members: dict[str, T] = {}
        homes: dict[str, str] = {}
        for module in self._modules():
            for member in vars(module).values():
                name = self._name_of(member) if _is_of(member, module) else None
                if name is None:
                    continue
                if name not in members:
                    members[name], homes[name] = member, module.__name__
                elif members[name] is not member:
                    raise ValueError(
                        f"two {self._kind}s are called {name}: in {homes[name]} and {module.__name__}; rename one"
                    )
        return members

    def _modules(self) -> Iterator[ModuleType]:
        head, _, tail = self._part.partition(".")
        for folder in self._folders:
            for info in pkgutil.iter_modules(importlib.import_module(folder).__path__, f"{folder}."):
                if not head:
                    yield importlib.import_module(info.name)
                elif info.ispkg and any(
                    inner.name == head for inner in pkgutil.iter_modules(importlib.import_module(info.name).__path__)
                ):
                    yield importlib.import_module(f"{info.name}.{head}.{tail}" if tail else f"{info.name}.{head}")

    def refresh(self) -> None:
        """Forget the members: the folders are searched again at the next use."""
        self._members = None

    @property
    def _members_in_order(self) -> Mapping[str, T]:
        if self._members is None:
            self._members = self._order(self.search())
        return self._members

    def __getitem__(self, name: str) -> T:
        return self._members_in_order[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._members_in_order)

    def __len__(self) -> int:
        return len(self._members_in_order)


def _is_of(member: object, module: ModuleType) -> bool:
    """Return whether ``module``, or a module inside of it, defines ``member``; true for what says nothing of it."""
    home = member.__module__ if isinstance(member, type | FunctionType) else module.__name__
    return home == module.__name__ or home.startswith(f"{module.__name__}.")
