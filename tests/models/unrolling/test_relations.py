from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from graphopt.graph.weights import Expression, Inline, nodes_below
from graphopt.models.checkpoint_tensors import Parameter
from graphopt.models.unrolling.refusals import NotUnderstoodError
from graphopt.models.unrolling.relations import Relations
from graphopt.models.unrolling.skeleton import make_skeleton

FOLDED_FROM = "pkg.onnxscript.optimizer.folded_from"


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # Larger than what is random in a skeleton, and smaller.
        self.matrix = torch.nn.Parameter(torch.zeros(200, 300))
        self.experts = torch.nn.Parameter(torch.zeros(4, 100, 60))
        self.gain = torch.nn.Parameter(torch.zeros(64))
        self.table = torch.nn.Parameter(torch.zeros(40, 16))
        self.second_gain = torch.nn.Parameter(torch.zeros(64))


@pytest.fixture(scope="module")
def model() -> Any:
    skeleton = Model()
    make_skeleton(skeleton)
    return skeleton


def relation(model: Any, array: Any, *folded_from: str) -> Expression:
    value = ir.val("constant", const_value=ir.tensor(array))
    if folded_from:
        value.metadata_props[FOLDED_FROM] = repr(sorted(folded_from))
    return Relations(model).expression_of(value)


VIEWS = {
    "itself": ("matrix", lambda x: x),
    "transposed": ("matrix", lambda x: x.T),
    "one expert": ("experts", lambda x: x[2]),
    "half of the rows": ("matrix", lambda x: x[100:]),
    "half of the columns, transposed": ("matrix", lambda x: x[:, 150:].T),
    "experts transposed": ("experts", lambda x: x.transpose(0, 2, 1)),
    "reshaped": ("matrix", lambda x: x.reshape(100, 600)),
    "a new axis": ("gain", lambda x: x[None, :, None]),
    "a piece of a gain": ("gain", lambda x: x[3:7]),
}


@pytest.mark.parametrize(("name", "view"), VIEWS.values(), ids=VIEWS)
def test_a_view_is_found_and_holds_for_other_numbers(model: Any, name: str, view: Any) -> None:
    expression = relation(model, view(getattr(model, name).detach().numpy()))
    (leaf,) = [node for node in nodes_below(expression) if isinstance(node, Parameter)]
    assert leaf.name == name
    numbers = np.random.default_rng(0).standard_normal(leaf.shape).astype(np.float32)
    assert np.array_equal(expression.replacing({leaf: Inline.from_array(numbers)}).numpy(), view(numbers))


@pytest.mark.parametrize(
    "compute",
    [lambda x: 1 + x, lambda x: x - np.float32(0.5), lambda x: np.float32(8) * x, lambda x: x / np.float32(4)],
)
def test_a_computed_gain_is_found(model: Any, compute: Any) -> None:
    expression = relation(model, compute(model.gain.detach().numpy()), "gain", "one")
    (leaf,) = [node for node in nodes_below(expression) if isinstance(node, Parameter)]
    numbers = np.random.default_rng(0).standard_normal(64).astype(np.float32)
    assert np.array_equal(expression.replacing({leaf: Inline.from_array(numbers)}).numpy(), compute(numbers))


@pytest.mark.parametrize(
    "look_up", [lambda x: x[None, :].copy(), lambda x: x[2:30].copy(), lambda x: x[7:19].reshape(3, 4, 16).copy()]
)
def test_rows_that_were_looked_up_are_found(model: Any, look_up: Any) -> None:
    expression = relation(model, look_up(model.table.detach().numpy()), "positions", "table")
    (leaf,) = [node for node in nodes_below(expression) if isinstance(node, Parameter)]
    numbers = np.random.default_rng(0).standard_normal(leaf.shape).astype(np.float32)
    assert np.array_equal(expression.replacing({leaf: Inline.from_array(numbers)}).numpy(), look_up(numbers))


def test_a_constant_of_its_own_stays_a_constant(model: Any) -> None:
    array = np.arange(6, dtype=np.float32)
    expression = relation(model, array, "val_3")
    assert not any(isinstance(node, Parameter) for node in nodes_below(expression))
    assert np.array_equal(expression.numpy(), array)


@pytest.mark.parametrize(
    ("compute", "names"),
    [
        (lambda m: np.exp(m.gain.detach().numpy()), ("gain",)),
        (lambda m: (m.gain * m.second_gain).detach().numpy(), ("gain", "second_gain")),
        (lambda m: np.repeat(m.gain.detach().numpy(), 2), ("gain",)),
        (lambda m: m.table.detach().numpy()[[3, 4, 6]], ("table",)),
        (lambda m: m.matrix.detach().numpy()[3:7].copy(), ("matrix",)),
        (lambda m: np.lib.stride_tricks.as_strided(m.gain.detach().numpy(), (60, 3), (4, 4)), ()),
    ],
)
def test_what_is_not_known_is_refused(model: Any, compute: Any, names: tuple[str, ...]) -> None:
    with pytest.raises(NotUnderstoodError, match="the exporter computes constant of"):
        relation(model, compute(model), *names)


def test_a_parameter_without_numbers_says_so() -> None:
    with pytest.raises(ValueError, match=r"exported without weights, so model\.gain has no numbers"):
        Parameter("model.gain", ir.DataType.FLOAT, (3,)).numpy()
