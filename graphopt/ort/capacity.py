"""Whether this machine has memory to run a model, or two beside one another."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphopt.graph.diagnostics import Fact, Rule
from graphopt.util.memory import available_memory
from graphopt.util.processors import processors

if TYPE_CHECKING:
    import onnx_ir as ir

# Times the size of a model: its weights, and as onnxruntime packs them.
_SINGLE_FACTOR = 2
# The same with what the model computes, which two models compute at one time.
_PAIR_FACTOR = 4

NO_MEMORY = Rule(
    "equivalence.no-memory", "running the model needs about {needed_gb:.1f} GB of memory, {free_gb:.1f} GB are free"
)


def no_room_for(model: ir.Model) -> Fact | None:
    """Return why a model cannot be run here; ``None`` where it can."""
    need, free = _SINGLE_FACTOR * _bytes_of(model), available_memory()
    return NO_MEMORY(needed_gb=need / 1e9, free_gb=free / 1e9) if need > free else None


def fit_beside(model: ir.Model, second: ir.Model) -> bool:
    """Return whether two models can be run beside one another: there are processors and memory for both."""
    return processors() > 1 and _PAIR_FACTOR * (_bytes_of(model) + _bytes_of(second)) < available_memory()


def fit_as_floats(model: ir.Model) -> bool:
    """Return whether two models of this size can be run beside one another with all their codes decoded to float32."""
    tensors = [value.const_value for value in model.graph.initializers.values() if value.const_value is not None]
    return 2 * _PAIR_FACTOR * 4 * sum(tensor.size for tensor in tensors) < available_memory()


def _bytes_of(model: ir.Model) -> int:
    return sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value is not None)
