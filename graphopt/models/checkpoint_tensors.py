"""The tensors of a model that checkpoints hold: which they are, and one whose numbers are not known."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from graphopt.graph.weights import Array, Expression, Region, Shape

if TYPE_CHECKING:
    from collections.abc import Iterator

    import onnx_ir as ir


@dataclasses.dataclass(frozen=True, eq=False)
class Parameter(Expression):
    """A parameter of the model, whose numbers are not bound yet.

    Attributes:
        name: its dotted name in the model.
        kind: its type.
        dims: its dimensions.
    """

    name: str
    kind: ir.DataType
    dims: Shape

    @property
    def dtype(self) -> ir.DataType:
        """The parameter's."""
        return self.kind

    @property
    def shape(self) -> Shape:
        """The parameter's."""
        return self.dims

    def evaluate(self, region: Region) -> Array:
        """Refuse: there are no numbers."""
        del region
        raise ValueError(f"the graph was exported without weights, so {self.name} has no numbers")


def stored_tensors(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield name and tensor of what checkpoints of ``model`` hold: tied ones under each name; integers left out."""
    yield from model.named_parameters(remove_duplicate=False)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        module, _, attribute = name.rpartition(".")
        persistent = attribute not in model.get_submodule(module)._non_persistent_buffers_set
        if persistent and buffer.is_floating_point():
            yield name, buffer
