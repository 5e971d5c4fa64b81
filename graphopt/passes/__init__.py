"""The passes: one file or folder, one rewrite, in the folder of its phase. A new file is all that a new pass takes."""

from __future__ import annotations

import importlib
import pkgutil
from graphlib import TopologicalSorter
from typing import TYPE_CHECKING, Any

from graphopt.passes.base import Pass
from graphopt.passes.phases import PHASES, Phase

if TYPE_CHECKING:
    from collections.abc import Iterator

    import onnx_ir as ir


def passes_of(phase: Phase) -> Iterator[type[Pass[Any]]]:
    """Yield the passes of a phase, each behind those that its ``after`` names, else by name."""
    folder = importlib.import_module(f"{__name__}.{phase}")
    found: dict[str, type[Pass[Any]]] = {}
    for info in pkgutil.iter_modules(folder.__path__, f"{folder.__name__}."):
        module = importlib.import_module(info.name)
        for each in vars(module).values():
            if isinstance(each, type) and issubclass(each, Pass) and each.__module__ == info.name:
                found[each.name] = each
    before = {name: [other for other in each.after if other in found] for name, each in sorted(found.items())}
    yield from (found[name] for name in TopologicalSorter(before).static_order())


PASSES: dict[str, Any] = {each.name: each for phase in PHASES for each in passes_of(phase)}
"""Every pass by the name that recipes call it: phase by phase, in the order that a recipe usually has them."""


def imports_of(graph: ir.Graph) -> list[Pass[Any]]:
    """Return the passes of the phase ``importing`` that a graph needs, with their default options."""
    passes = (each for each in PASSES.values() if each.phase() == "importing" and each.needed(graph))
    return [each(each.options_type()) for each in passes]


__all__ = ["PASSES", "imports_of", "passes_of"]
