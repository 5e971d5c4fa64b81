from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from graphopt.graph.weights import Inline
from graphopt.graph.weights.safetensors_files import tensors_of_folder
from graphopt.models.checkpoint import load_config, load_model
from graphopt.models.lazy_tensors import NotLazyError, expression_of_tensor, lazy_tensors

# What transformers does to weights while it loads them, and every other way to say it that torch has.
OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "transpose": lambda x, y: x.transpose(0, 2),
    "t": lambda x, y: x[0].t(),
    "permute": lambda x, y: x.permute(2, 0, 1),
    "reshape": lambda x, y: x.reshape(4, 3, 2),
    "view of what was turned": lambda x, y: x.transpose(1, 2).contiguous().view(2, -1),
    "unsqueeze": lambda x, y: x.unsqueeze(1).unsqueeze(-1),
    "squeeze": lambda x, y: x[:, :1].squeeze(1),
    "all of it": lambda x, y: x[...],
    "slice": lambda x, y: x[:, 1:, ::2],
    "one row": lambda x, y: x[1, -1],
    "chunk": lambda x, y: torch.chunk(x, 2, dim=2)[1],
    "split": lambda x, y: torch.split(x, [1, 2], dim=1)[1],
    "unbind": lambda x, y: torch.unbind(x)[1],
    "cat": lambda x, y: torch.cat([x, y], dim=-1),
    "stack": lambda x, y: torch.stack([x, y], dim=1),
    "halves of rotary": lambda x, y: x.view(2, 3, 2, 2).transpose(2, 3).reshape(2, 3, 4),
    "widened": lambda x, y: x.half().to(torch.float32),
    "copied": lambda x, y: x.detach().clone().to(device="cpu", dtype=torch.float32),
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_operation_is_that_of_torch(operation: Callable[[Any, Any], Any]) -> None:
    random = np.random.default_rng(0)
    x, y = (random.standard_normal((2, 3, 4)).astype(np.float32) for _ in range(2))
    lazy = lazy_tensors({"x": Inline.from_array(x), "y": Inline.from_array(y)})
    result, expected = operation(lazy["x"], lazy["y"]), operation(torch.from_numpy(x), torch.from_numpy(y))
    expression = expression_of_tensor(result)
    assert expression is not None
    assert result.shape == expected.shape
    assert np.array_equal(expression.numpy(), expected.numpy())


def test_equal_tensors_are_equal() -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    lazy = lazy_tensors(
        {"x": Inline.from_array(x), "same": Inline.from_array(x.copy()), "other": Inline.from_array(x + 1)}
    )
    assert torch.equal(lazy["x"], lazy["same"])
    assert not torch.equal(lazy["x"], lazy["other"])


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: torch.add(x, 1),
        lambda x: torch.mm(x, x.t()),
        lambda x: x.sum(),
        lambda x: x.to(torch.int64),
        lambda x: x.zero_(),
    ],
)
def test_what_computes_is_refused(operation: Callable[[Any], Any]) -> None:
    (lazy,) = lazy_tensors({"x": Inline.from_array(np.ones((2, 3), np.float32))}).values()
    with pytest.raises(NotLazyError):
        operation(lazy)


# Experts that are stacked, a projection stored [in, out], tied weights, an encoder.
@pytest.mark.parametrize("family", ["mixtral", "gpt2", "llama", "bert"])
def test_checkpoint_is_loaded_as_transformers_loads_it(family: str, make_folder: Callable[[str], Path]) -> None:
    folder = make_folder(family)
    lazy = load_model(load_config(str(folder)), str(folder), tensors_of_folder(folder))
    real = load_model(load_config(str(folder)), str(folder))
    parameters = dict(real.named_parameters(remove_duplicate=False))
    lazy_parameters = dict(lazy.named_parameters(remove_duplicate=False))
    assert lazy_parameters.keys() == parameters.keys()
    for name, parameter in parameters.items():
        expression = expression_of_tensor(lazy_parameters[name])
        assert expression is not None, name
        assert np.array_equal(expression.numpy(), parameter.detach().numpy()), name
    buffers = dict(lazy.named_buffers())
    for name, buffer in real.named_buffers():
        assert torch.equal(buffers[name], buffer), name
