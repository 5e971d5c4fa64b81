"""A program that is lowered node by node is the graph that torch makes of it; what is not known is left to torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from graphopt.models import lowering
from graphopt.models.lowering import lowered_by_node
from tests.checkpoints import know_torchlib
from tests.isomorphic import description


def casts(x: Any, n: Any) -> Any:
    """Of an integer to a float, of a float to itself, and an operand of another type."""
    return x.to(x.device) * n.to(x.dtype) + n, n.type_as(x).to(x.dtype)


def reshapes(x: Any, n: Any) -> Any:
    """Of strides that allow no view, to the shape that it has, and of contiguous memory."""
    transpose = x.transpose(0, 1)
    return (
        transpose.reshape(-1),
        transpose.reshape(transpose.shape[0], transpose.shape[1]),
        transpose.contiguous().reshape(2, 2, -1),
    )


def axes(x: Any, n: Any) -> Any:
    """Of a size that varies and has a node, and arithmetic with a number in front."""
    column = x.new_ones(x.shape[0], 1)
    split = x.unflatten(1, (2, 3))
    return 1 - split, split.exp().flatten(1), x.square() + column


def pieces(x: Any, n: Any) -> Any:
    """Of a size that is known."""
    a, b, c = x.chunk(3, -1)
    return a * b, (c > 0) & (a > 0), (c > 0) | (a > 0), a.min(b), b.max(c)


def writes(x: Any, n: Any) -> Any:
    """Into new memory, twice; who reads it later reads what was written."""
    y = x * 2
    y += 1
    z = y.clamp_(0, 3)
    return y.view(-1), z - x, x.new_zeros(4, 4).index_put_((n[0],), x[0, 0])


def sizes(x: Any, n: Any) -> Any:
    """Of a size that varies and has no node, alone and in a product."""
    image = x.reshape(x.shape[0], 2, 3).repeat(1, 1, 2).transpose(0, 2)
    return image.flatten(0, 1), image.flatten(1), image.flatten()


def orders(x: Any, n: Any) -> Any:
    import torch

    return torch.argsort(x), torch.argsort(n, 0, True)


def convolutions(x: Any, n: Any) -> Any:
    """Of a padding that has a name."""
    import torch

    image, taps = x.reshape(1, 2, -1, 3), x.new_ones(4, 2, 3, 1)
    by_name = [torch.nn.functional.conv2d(image, taps, padding=padding) for padding in ("same", "valid")]
    return *by_name, torch.nn.functional.conv2d(image, taps, stride=1, dilation=2, padding="same")


def turns(x: Any, n: Any) -> Any:
    """Of axes, of a row for all rows, and of pairs by an operator of ONNX."""
    import torch

    row, pairs = x[:1].broadcast_to(x.shape[0], 6), x.reshape(1, 1, -1, 6)
    angles = pairs[0, :, :, :3]
    return x.T, row + x, torch.onnx.ops.rotary_embedding(pairs, angles, angles)


def inference(x: Any, n: Any) -> Any:
    import torch

    return x.detach() + torch.nn.functional.dropout(x, 0.5, training=False)


def writes_through_a_view(x: Any, n: Any) -> Any:
    y = x * 2
    y[:, 0] += 1
    return y


def writes_beside_a_view(x: Any, n: Any) -> Any:
    y = x * 2
    view = y.view(-1)
    y += 1
    return view, y


def writes_another_type(x: Any, n: Any) -> Any:
    return (x.half() * 2).add_(x)


def is_decomposed(x: Any, n: Any) -> Any:
    import torch

    return torch.special.entr(x)


def pads_unevenly(x: Any, n: Any) -> Any:
    """One more zero behind than in front, for which ``conv2d`` of torch has no number."""
    import torch

    return torch.nn.functional.conv2d(x.reshape(1, 2, -1, 3), x.new_ones(4, 2, 2, 1), padding="same")


def onnx_of(compute: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, by_node: bool) -> tuple[Any, list[bool]]:
    """Return the graph without names of a function of float32 [rows, 6] and int64 [2, 3], and what was lowered."""
    import torch

    class Module(torch.nn.Module):
        def forward(self, x: Any, n: Any) -> Any:
            return compute(x, n)

    answers: list[bool] = []
    lower = lowering.lower
    inputs = torch.randn(4, 6), torch.tensor([[0, 1, 2], [1, 2, 3]])
    if compute is casts:
        inputs = inputs[0], torch.arange(6)[None]
    with monkeypatch.context() as patch, lowered_by_node() if by_node else contextlib.nullcontext():
        patch.setattr(lowering, "lower", lambda *args: answers.append(lower(*args)) or answers[-1])
        program = torch.export.export(Module(), inputs, dynamic_shapes=({0: torch.export.Dim.AUTO}, None))
        names = [f"y{number}" for number in range(len(program.graph_signature.user_outputs))]
        program_onnx = torch.onnx.export(program, (), dynamo=True, opset_version=23, output_names=names, verbose=False)
    assert program_onnx is not None
    return description(program_onnx.model)[0], answers


SUPPORTED_CASES = [casts, reshapes, axes, sizes, orders, convolutions, pieces, turns, writes, inference]
TORCH_CASES = [writes_through_a_view, writes_beside_a_view, writes_another_type, pads_unevenly, is_decomposed]


@pytest.mark.parametrize("compute", [*SUPPORTED_CASES, *TORCH_CASES], ids=lambda compute: compute.__name__)
def test_the_graph_is_that_of_torch(compute: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    know_torchlib()
    graph, answers = onnx_of(compute, monkeypatch, by_node=True)
    torch_graph, no_answers = onnx_of(compute, monkeypatch, by_node=False)
    assert (answers, no_answers, graph == torch_graph) == ([compute in SUPPORTED_CASES], [], True)
