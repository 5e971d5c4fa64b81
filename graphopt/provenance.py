"""Which pass made a node, and from what: a record that every node and weight carries in ``metadata_props``.

``graphopt.pass`` names the pass; ``graphopt.from`` lists, separated by spaces, the nodes or weights it was made from.
A later pass that edits the same thing appends itself to the first and leaves the second, so the record is a history.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

PASS = "graphopt.pass"
FROM = "graphopt.from"
SCOPE = "pkg.torch.onnx.name_scopes"
"""Where the torch exporter writes the modules that a node came from."""


def record(item: ir.Node | ir.Value, pass_name: str, sources: Iterable[ir.Node | ir.Value | str] = ()) -> None:
    """Write into ``item`` that ``pass_name`` made or edited it from ``sources``."""
    history = item.metadata_props.get(PASS)
    item.metadata_props[PASS] = pass_name if history is None else f"{history} {pass_name}"
    names = [source if isinstance(source, str) else source.name or "" for source in sources]
    if names:
        item.metadata_props.setdefault(FROM, " ".join(dict.fromkeys(names)))


def history(item: ir.Node | ir.Value) -> tuple[list[str], list[str]]:
    """Return the passes that ``item`` went through, oldest first, and the names that it was made from."""
    return item.metadata_props.get(PASS, "").split(), item.metadata_props.get(FROM, "").split()
