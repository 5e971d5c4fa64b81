"""Steps run on their own in onnxruntime, to see what they mean, and whole recurrences, to prove it."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx import helper, numpy_helper

from graphopt.ort.session import run
from graphopt.passes.lift.canonicalize.recurrences.meaning import Outcome, is_positive

if TYPE_CHECKING:
    from collections.abc import Mapping

    from graphopt.ort.runner import Runner
    from graphopt.passes.lift.canonicalize.recurrences.steps import Steps

Array = npt.NDArray[Any]

_FLOAT = ir.DataType.FLOAT
_TOKENS = 6  # of a proof, where the graph leaves their number open
_STEP_SIZE, _PROOF_SIZE = 2, 3  # of other dimensions that it leaves open


class NotRunError(Exception):
    """onnxruntime refused a part of the graph."""


class Sessions(contextlib.ExitStack):
    """Opens parts of the graph; closes them at the end of a ``with`` block.

    Args:
        runner: opens them.
    """

    def __init__(self, runner: Runner) -> None:
        super().__init__()
        self._runner = runner

    def open(self, model: ir.Model) -> Any:
        """Return a session.

        Raises:
            NotRunError: onnxruntime refuses the model.
        """
        try:
            return self.enter_context(self._runner.open_model(model, rewritten=False))
        except Exception as error:  # whatever onnxruntime raises: what cannot be run is left alone
            raise NotRunError(str(error)) from error

    def run(self, model: ir.Model, feeds: Mapping[str, Array]) -> list[Array]:
        """Return the outputs of a model.

        Raises:
            NotRunError: onnxruntime refuses the model, or cannot run it.
        """
        return run_session(self.open(model), None, feeds)


def run_session(session: Any, names: list[str] | None, feeds: Mapping[str, Array]) -> list[Array]:
    """Return outputs of a session.

    Raises:
        NotRunError: onnxruntime cannot run it.
    """
    try:
        return run(session, names, feeds)
    except Exception as error:  # as above
        raise NotRunError(str(error)) from error


def _sizes(value: ir.Value, size: int, without: int | None = None) -> tuple[int, ...]:
    """Return a shape that a value can have: open dimensions have ``size``; one axis is left out."""
    assert value.shape is not None
    dims = [dim if isinstance(dim, int) else size for dim in value.shape]
    return tuple(dim for axis, dim in enumerate(dims) if axis != without)


def _random(random: np.random.Generator, value: ir.Value, shape: tuple[int, ...]) -> Array:
    """Return numbers that a value can have: from 0 to 1 where it is never negative, else rows of length 1 or so."""
    if is_positive(value):
        return random.uniform(0.1, 0.99, shape).astype(np.float32)
    return (random.standard_normal(shape) / math.sqrt(shape[-1] if shape else 1)).astype(np.float32)


class Step:
    """A step of a recurrence as a model of its own, whose tokens stay the same.

    Args:
        steps: the recurrence.
        sessions: opens the model.

    Attributes:
        shape: of the state.
        positive: tokens that are never below 0.
        values: those that do not depend on the state, after a run.

    Raises:
        NotRunError: onnxruntime refuses the step.
    """

    def __init__(self, steps: Steps, sessions: Sessions) -> None:
        random = np.random.default_rng(2)
        self.shape = _sizes(steps.initial, _STEP_SIZE)
        self.positive = frozenset(tokens.inside for tokens in steps.tokens if is_positive(tokens.outside))
        state = ir.val("state", _FLOAT, self.shape)
        inputs, initializers, values = [state], [], {steps.state: state}
        self._feeds: dict[str, Array] = {}
        for number, tokens in enumerate(steps.tokens):
            name, shape = f"token{number}", _sizes(tokens.outside, _STEP_SIZE, tokens.axis)
            self._feeds[name] = _random(random, tokens.outside, shape)
            values[tokens.inside] = ir.val(name, _FLOAT, shape)
            inputs.append(values[tokens.inside])
        for number, constant in enumerate(steps.constants):
            assert constant.const_value is not None
            tensor = ir.tensor(constant.const_value.numpy(), name=f"constant{number}")
            values[constant] = ir.val(f"constant{number}", const_value=tensor)
            initializers.append(values[constant])
        nodes, of_state = [], {steps.state}
        for node in steps.nodes:
            operands = [None if value is None else values[value] for value in node.inputs]
            outputs = len(node.outputs)
            copy = ir.node(node.op_type, operands, domain=node.domain, num_outputs=outputs)
            copy.attributes.update(node.attributes)
            nodes.append(copy)
            values.update(zip(node.outputs, copy.outputs, strict=True))
            if of_state.intersection(node.inputs):
                of_state.update(node.outputs)
        for number, output in enumerate(output for node in nodes for output in node.outputs):
            output.name = f"value{number}"
        self._of_tokens = [value for node in steps.nodes for value in node.outputs if value not in of_state]
        results = [steps.new_state, steps.output, *self._of_tokens]
        self._names = [values[value].name or "" for value in results]
        outputs_of_graph = list(dict.fromkeys(values[value] for value in results))
        opsets = {} if steps.node.graph is None else dict(steps.node.graph.opset_imports)
        graph = ir.Graph(
            inputs, outputs_of_graph, nodes=nodes, initializers=initializers, opset_imports=opsets, name="step"
        )
        self._session = sessions.open(ir.Model(graph, ir_version=10))
        tokens_by_value = {tokens.inside: self._feeds[f"token{number}"] for number, tokens in enumerate(steps.tokens)}
        constants = {value: value.const_value.numpy() for value in steps.constants if value.const_value is not None}
        self.values: dict[ir.Value, Array] = tokens_by_value | constants

    def run(self, state: Array) -> Outcome:
        """Do the step on a state.

        Raises:
            NotRunError: onnxruntime cannot.
        """
        after, output, *values = run_session(self._session, self._names, {"state": state, **self._feeds})
        self.values.update(zip(self._of_tokens, values, strict=True))
        return Outcome(after, output, self.values)


def part_of_steps(steps: Steps) -> tuple[ir.Model, dict[str, Array], int]:
    """Return the recurrence as a model of its own, random inputs for it, and how many tokens those have."""
    random, node = np.random.default_rng(3), steps.node
    graph = node.graph
    assert graph is not None
    feeds = {steps.initial.name or "": random.standard_normal(_sizes(steps.initial, _PROOF_SIZE)).astype(np.float32)}
    length = 0
    for tokens in steps.tokens:
        assert tokens.outside.shape is not None
        shape = list(_sizes(tokens.outside, _PROOF_SIZE))
        if not isinstance(tokens.outside.shape[tokens.axis], int):
            shape[tokens.axis] = _TOKENS
        length = shape[tokens.axis]
        feeds[tokens.outside.name or ""] = _random(random, tokens.outside, tuple(shape))
    constants = {value.name: value.const_value for value in (*steps.constants, *node.inputs) if value is not None}
    initializers = [
        numpy_helper.from_array(tensor.numpy(), name)
        for name, tensor in constants.items()
        if tensor is not None and name in graph.initializers and name not in feeds
    ]
    count = node.inputs[0] if node.op_type == "Loop" else None
    if count is not None and count.const_value is None:
        feeds[count.name or ""] = np.full(
            (1,) if count.shape is not None and len(count.shape) else (), length, np.int64
        )
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), [None] * array.ndim)
        for name, array in feeds.items()
    ]
    outputs = [helper.make_tensor_value_info(value.name or "", _FLOAT, None) for value in node.outputs]
    proto = helper.make_graph([ir.to_proto(node)], "part", inputs, outputs, initializers)
    opsets = [helper.make_opsetid(domain, version) for domain, version in graph.opset_imports.items()]
    return ir.from_proto(helper.make_model(proto, opset_imports=opsets, ir_version=10)), feeds, length
