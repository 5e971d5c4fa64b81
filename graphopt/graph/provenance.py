"""Which pass made a node, and from what: a record that every node and weight carries in ``metadata_props``.

``graphopt.history`` is a JSON list of steps, oldest first::

    [{"pass": "canonicalize", "made": "attn", "from": ["attn.scores", "attn.softmax", "attn.values"]},
     {"pass": "page_kv", "made": "attn", "from": ["attn"]}]

What a pass makes of a node takes over the steps of that node, and of every other that it is made from; so the record
leads back to the model as it came in, though the nodes between are gone. What was removed is in the report of the pass,
:class:`graphopt.graph.diagnostics.PassReport`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    import onnx_ir as ir

HISTORY = "graphopt.history"
SCOPE = "pkg.torch.onnx.name_scopes"
"""Where the torch exporter writes the modules that a node came from."""


@dataclass(frozen=True)
class HistoryStep:
    """One step of a history.

    Attributes:
        pass_name: the pass that made or edited something.
        name: what it was called then.
        sources: the nodes or weights that it was made from; itself where it was edited in place.
    """

    pass_name: str
    name: str
    sources: tuple[str, ...] = ()


def record(item: ir.Node | ir.Value, pass_name: str, sources: Iterable[ir.Node | ir.Value | str] = ()) -> None:
    """Write into ``item`` that ``pass_name`` made or edited it from ``sources``, and what these were made from."""
    sources = list(sources)
    names = [source if isinstance(source, str) else source.name or "?" for source in sources]
    before = [step for source in sources if not isinstance(source, str) for step in steps(source)]
    new = HistoryStep(pass_name, item.name or "?", tuple(dict.fromkeys(names)))
    history = dict.fromkeys([*before, *steps(item), new])
    content = [{"pass": step.pass_name, "made": step.name, "from": list(step.sources)} for step in history]
    item.metadata_props[HISTORY] = json.dumps(content, separators=(",", ":"), ensure_ascii=False)


def steps(item: ir.Node | ir.Value) -> list[HistoryStep]:
    """Return what became of ``item``, and of all that it was made from, oldest first."""
    entries = json.loads(item.metadata_props.get(HISTORY, "[]"))
    return [HistoryStep(entry["pass"], entry["made"], tuple(entry["from"])) for entry in entries]


def history(item: ir.Node | ir.Value) -> tuple[list[str], list[str]]:
    """Return the passes that ``item`` went through, oldest first, and the names that it was made from in the model.

    The names are those that no step made: nodes and weights of the model as it came in.
    """
    path = steps(item)
    products: set[str] = set()
    origins: dict[str, None] = {}
    for step in path:
        # Without sources it was edited in place.
        origins.update(dict.fromkeys(name for name in step.sources or (step.name,) if name not in products))
        products.add(step.name)
    return list(dict.fromkeys(step.pass_name for step in path)), list(origins)
