"""One registry for all that is one file of a kind: passes, rounding methods, operators, storages, tasks, commands."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

T = TypeVar("T")


class Registry(Mapping[str, T], Generic[T]):
    """What the modules and packages directly in a folder define, by name; searched when it is first asked.

    A new file in the folder is all that a new member takes. Modules are read in the order of their names, members in
    the order of each file; ``order`` sorts afterwards.

    Args:
        package: the dotted name of the folder.
        kind: what a member is, for errors: "pass".
        name_of: the name of a member; ``None`` for an object of a module that is no member. An object that a module
            imports from another one is none either.
        order: sorts the members by name.

    Raises:
        ValueError: two members have the same name.
    """

    def __init__(
        self,
        package: str,
        kind: str,
        name_of: Callable[[object], str | None],
        order: Callable[[dict[str, T]], Mapping[str, T]] = dict,
    ) -> None:
        self._package, self._kind, self._name_of, self._order = package, kind, name_of, order
        self._members: Mapping[str, T] | None = None

    def search(self) -> dict[str, T]:
        """Return the members that are in the folder now."""
        members: dict[str, T] = {}
        home: dict[str, str] = {}
        folder = importlib.import_module(self._package)
        for info in pkgutil.iter_modules(folder.__path__, f"{self._package}."):
            for member in vars(importlib.import_module(info.name)).values():
                name = self._name_of(member)
                if name is None or getattr(member, "__module__", info.name) != info.name:
                    continue
                if name in members:
                    raise ValueError(f"two {self._kind}s are called {name}: in {home[name]} and {info.name}")
                members[name], home[name] = member, info.name
        return members

    @property
    def members(self) -> Mapping[str, T]:
        """The members by name."""
        if self._members is None:
            self._members = self._order(self.search())
        return self._members

    def refresh(self) -> None:
        """Forget what was found: the folder is searched again when it is next asked."""
        self._members = None

    def __getitem__(self, name: str) -> T:
        return self.members[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.members)

    def __len__(self) -> int:
        return len(self.members)
