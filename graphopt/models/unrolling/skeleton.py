"""A model of transformers whose parameters take address space and no memory, so that a model of any size is traced.

Buffers that a model computes for itself, such as the frequencies of a rotary embedding, are real. A large parameter is
zeros that are never written, which the system backs with no memory; a small one is random, so that the exporter, which
merges equal constants, keeps it apart from others. Where a parameter lies is its identity: a tensor of the exported
graph that lies within it is a view of it, see :mod:`graphopt.models.unrolling.relations`.
"""

from __future__ import annotations

import importlib
import mmap
from typing import Any

from graphopt.models.checkpoint_tensors import stored_tensors

# Parameters of up to so many bytes are random numbers. Exporters compare and compute with constants of up to 8192
# numbers (`onnxscript.optimizer`), so all of these must be among them.
_SMALL = 1 << 16
# Not in Python's mmap: address space that the system does not count as memory that may be needed.
_NO_RESERVE = 0x4000


def make_skeleton(model: Any) -> None:
    """Replace every parameter of ``model``, and every buffer that belongs to checkpoints, in place.

    Parameters that are tied stay tied. All other buffers stay what they are.

    Args:
        model: a model of transformers in evaluation mode; its parameters may be on the device ``meta``, or lazy.
    """
    torch = importlib.import_module("torch")
    placeholders: dict[int, tuple[Any, Any]] = {}
    for number, (name, tensor) in enumerate(stored_tensors(model)):
        if id(tensor) not in placeholders:
            placeholder = _random(torch, tensor, number) if _bytes(tensor) <= _SMALL else _unwritten(torch, tensor)
            if isinstance(tensor, torch.nn.Parameter):
                placeholder = torch.nn.Parameter(placeholder, requires_grad=False)
            # The original is kept, so that its id belongs to nothing else meanwhile.
            placeholders[id(tensor)] = (placeholder, tensor)
        module, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(module), attribute, placeholders[id(tensor)][0])


def _bytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())


def _random(torch: Any, tensor: Any, seed: int) -> Any:
    # Between 1 and 2: nothing is merged with a constant 0 or 1, and no norm divides by zero.
    generator = torch.Generator().manual_seed(seed)
    return (1 + torch.rand(tuple(tensor.shape), generator=generator, dtype=torch.float64)).to(tensor.dtype)


def _unwritten(torch: Any, tensor: Any) -> Any:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    return torch.frombuffer(mmap.mmap(-1, _bytes(tensor), flags=flags), dtype=tensor.dtype).reshape(tensor.shape)
