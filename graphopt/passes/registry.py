"""Which passes there are: a class that derives from :class:`Pass`, in the folder of its phase."""

from __future__ import annotations

from graphlib import TopologicalSorter
from typing import Any

from graphopt.passes.base import Pass
from graphopt.passes.phases import PHASES
from graphopt.util.registry import Registry


def _name_of(member: Any) -> str | None:
    return getattr(member, "name", None) if isinstance(member, type) and issubclass(member, Pass) else None


def _by_phase(passes: dict[str, type[Pass]]) -> dict[str, type[Pass]]:
    """Sort passes by phase; in a phase, each behind those that its ``after`` names, else by name."""
    order: list[str] = []
    for phase in PHASES:
        names = sorted(name for name, step in passes.items() if step.phase() == phase)
        predecessors = {
            name: [predecessor for predecessor in passes[name].after if predecessor in names] for name in names
        }
        order += TopologicalSorter(predecessors).static_order()
    return {name: passes[name] for name in order}


PASSES: Registry[type[Pass]] = Registry(
    *(f"graphopt.passes.{phase}" for phase in PHASES), kind="pass", name_of=_name_of, order=_by_phase
)
"""Every pass by the name that recipes call it: phase by phase, in the order that a recipe usually has them."""
