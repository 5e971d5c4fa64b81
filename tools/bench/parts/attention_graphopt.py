"""graphopt's attention over a cache of its own, ``KVAttention``, in onnxruntime through its library of kernels."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from graphopt.errors import InputError
from graphopt.inference.states.large_pages import aligned_zeros
from graphopt.ort.session import open_session
from graphopt.runtime_ops import DOMAIN, OPERATORS, library_path
from graphopt.runtime_ops.kv_attention.spec.attributes import (
    DENSE,
    LEVELS,
    RETRIEVAL,
    STORAGES,
    STREAMING,
    KVAttributes,
)
from tools.bench.parts import attention_state
from tools.bench.parts.attention_binding import Binding
from tools.bench.parts.attention_problem import AttentionProblem
from tools.bench.parts.engine import AnyEngine, Workload, optional
from tools.bench.parts.graphopt_engines import constant
from tools.bench.parts.onnxruntime_engines import STOP_SPINNING
from tools.bench.parts.problem import Array
from tools.bench.parts.unavailable import UnavailableError

_STATE = ("keys", "values", "scales", "recent", "summaries")

# By the norm of y. Floats: scores are sums of 128 float32 products, some of them large, good to 1e-5 or so; y is an
# average of about a hundred values and smaller than each of them, which makes errors relative to it larger. Integers:
# queries and probabilities may be rounded to 15 bits, which was seen to cost 4e-4 of y over 16k tokens and 1e-3 over
# 256k, as y is the smaller the more tokens it averages.
_FLOATS, _INTEGERS = 2e-5, 5e-3

_SINKS, _WINDOW = 4, 4096
"""Tokens that streaming reads. Retrieval reads as many sinks, and of the newest tokens as many as a page has."""


@dataclass(frozen=True)
class Choice:
    """The settings of a node: storage, policy, the summary that retrieval scores pages by, and its budget of tokens."""

    storage: str
    policy: int = DENSE
    summary: str = "bounds"
    budget: int | None = None
    token_factors: int = 0

    @property
    def tolerance(self) -> float:
        """The largest error that the storage's arithmetic explains."""
        return _INTEGERS if self.storage.startswith("int") else _FLOATS

    def attributes(self, problem: AttentionProblem) -> KVAttributes:
        """Return the attributes of the node."""
        page, budget = problem.case.page, problem.case.budget if self.budget is None else self.budget
        recent = {DENSE: 1, STREAMING: _WINDOW, RETRIEVAL: page}[self.policy]
        is_rounded = self.storage.startswith("int")
        return KVAttributes(
            kv_heads=problem.case.kv_heads,
            scale=problem.scale,
            page=page,
            storage=self.storage,
            sink_pages=int(is_rounded),
            recent_pages=int(is_rounded),
            policies=(self.policy,),
            sinks=0 if self.policy == DENSE else _SINKS,
            recent=recent,
            budget=budget // page if self.policy == RETRIEVAL else 0,
            summary=self.summary,
            token_factors=self.token_factors,
        )


def engines() -> list[AnyEngine[AttentionProblem]]:
    """Return every storage with dense attention, which has no suffix, and the policies with some."""
    candidates = [engine(f"graphopt-{storage}", Choice(storage)) for storage in STORAGES]
    for storage in LEVELS:
        candidates.append(engine(f"graphopt-{storage}-factors", Choice(storage, token_factors=1), default=False))
    for storage in STORAGES:
        default = storage in ("float32", "int8")
        for summary in ("bounds", "mean"):
            candidates.append(
                engine(f"graphopt-{storage}-{summary}", Choice(storage, RETRIEVAL, summary), default=default)
            )
        candidates.append(engine(f"graphopt-{storage}-streaming", Choice(storage, STREAMING), default=default))
    return candidates


def engine(name: str, choice: Choice, *, default: bool = True) -> AnyEngine[AttentionProblem]:
    """Return an engine for a choice."""
    return AnyEngine(name, choice.tolerance, partial(_prepare, choice=choice), kind="attention", default=default)


def _prepare(problem: AttentionProblem, choice: Choice) -> Workload:
    attrs, case = choice.attributes(problem), problem.case
    if case.past // attrs.page != (case.context - 1) // attrs.page:
        raise UnavailableError(
            f"the new tokens, from {case.past} to {case.context}, lie in two pages of {attrs.page}: a step that opens "
            "a page rounds another, and another one each time it is repeated"
        )
    pages = -(-case.context // attrs.page)
    if choice.policy == STREAMING:
        recent_tokens = attrs.recent + case.tokens + attrs.page
        pages = min(pages, attrs.first_pages - (-recent_tokens // attrs.page))
    state = _copies(problem, attrs, pages, 1)[0]
    masks = attention_state.masks(attrs, state, problem)
    reference = attention_state.reference(attrs, state, problem, masks)
    size = attention_state.bytes_read(attrs, state, problem, masks)
    states = _copies(problem, attrs, pages, problem.copies(size))
    for copy in states:
        attention_state.forget(attrs, copy, case.past, case.context, case.size)
    y = [np.zeros((1, case.tokens, case.heads * case.size), np.float32) for _ in states]
    binding = _open(problem, attrs, states, y)
    return Workload(binding.run, lambda: y, reference, size + problem.bytes_of_activations, keep=binding)


def _copies(problem: AttentionProblem, attrs: KVAttributes, pages: int, count: int) -> list[dict[str, Array]]:
    """Return ``count`` states. Engines share equal ones: all append the same tokens."""
    case, threads = problem.case, problem.settings.memory.threads
    key = (
        "state",
        attrs.storage,
        attrs.token_factors,
        attrs.page,
        pages,
        attrs.sink_pages,
        attrs.recent_pages,
        attrs.first_pages,
    )
    state_copies: list[dict[str, Array]] = problem.keep(
        key, lambda: [_copy(attention_state.fill(attrs, problem.sequence, case.context, pages, threads))]
    )
    _grow(state_copies, count)
    summaries: list[dict[str, Array]] = [{"summaries": attrs.state(1, pages, case.size).summaries.zeros()}]
    if attrs.retrieves:
        arguments = (attrs.summary, attrs.page, problem.sequence, case.context, pages, threads)
        summaries = problem.keep(arguments[:2], lambda: [_copy({"summaries": attention_state.summarize(*arguments)})])
        _grow(summaries, count)
    else:
        summaries *= count
    return [{**state, **summary} for state, summary in zip(state_copies[:count], summaries[:count], strict=True)]


def _grow(copies: list[dict[str, Array]], count: int) -> None:
    copies += [_copy(copies[0]) for _ in range(count - len(copies))]


def _copy(state: dict[str, Array]) -> dict[str, Array]:
    """Return a copy in memory that is allocated as a decoder's caches are."""
    copies = {name: aligned_zeros(array.shape, array.dtype) for name, array in state.items()}
    for name, copy in copies.items():
        copy[...] = state[name]
    return copies


def _open(problem: AttentionProblem, attrs: KVAttributes, states: list[dict[str, Array]], y: list[Array]) -> Binding:
    """Return a session of a node for each state.

    Raises:
        UnavailableError: there is no library, or onnxruntime refuses the graph with it.
    """
    optional("onnxruntime")
    if library_path() is None:
        raise UnavailableError("graphopt's library of kernels is not built")
    case = problem.case
    step_inputs: dict[str, Array] = {"query": problem.query.reshape(1, case.tokens, -1)}
    for name, array in zip(("key", "value"), problem.new, strict=True):
        step_inputs[name] = np.ascontiguousarray(array.swapaxes(1, 2)).reshape(1, case.tokens, -1)
    step_inputs |= {"past": np.array([case.past]), "new": np.array([case.tokens])}
    inputs, outputs = dict(step_inputs), {}
    step_values = {name: _value(name, array) for name, array in step_inputs.items()}
    no_numbers, no_state = constant("no_numbers", np.zeros(0, np.float32)), constant("no_state", _empty_state())
    no_scales = constant("no_scales", _empty_state().astype(np.float16))
    nodes, values, graph_outputs = [], list(step_values.values()), []
    for copy, state in enumerate(states):
        bound = {name: state[name] for name in _STATE if state[name].size}
        tensors = {name: _value(f"{name}{copy}", array) for name, array in bound.items()}
        node = ir.node(
            "KVAttention",
            [
                *step_values.values(),
                no_numbers,
                no_numbers,
                *(tensors.get(name, no_scales if name == "scales" else no_state) for name in _STATE),
            ],
            attrs.for_node(),
            domain=DOMAIN,
            num_outputs=6,
        )
        for name, value, array in zip(("y", *_STATE), node.outputs, (y[copy], *state.values()), strict=True):
            value.name = f"new_{name}{copy}"
            if name == "y" or name in bound:
                array = y[copy] if name == "y" else bound[name]
                value.type, value.shape = _type(array), ir.Shape(array.shape)
                outputs[value.name] = array
                graph_outputs.append(value)
        inputs |= {f"{name}{copy}": array for name, array in bound.items()}
        values += tensors.values()
        nodes.append(node)
    opsets = {"": 23, DOMAIN: max(operator.version for operator in OPERATORS.values())}
    graph = ir.Graph(
        values,
        graph_outputs,
        nodes=nodes,
        initializers=[no_numbers, no_state, no_scales],
        opset_imports=opsets,
        name="attention",
    )
    file = Path(tempfile.mkdtemp(dir=problem.settings.work)) / "model.onnx"
    ir.save(ir.Model(graph, ir_version=11), file)
    try:
        session = open_session(file, entries=STOP_SPINNING, threads=problem.settings.memory.threads)
    except InputError as error:
        raise UnavailableError(str(error).splitlines()[0]) from error
    return Binding(session, inputs, outputs)


def _empty_state() -> Array:
    return np.zeros((0, 0, 0, 0), np.float32)


def _value(name: str, array: Array) -> ir.Value:
    return ir.Value(name=name, type=_type(array), shape=ir.Shape(array.shape))


def _type(array: Array) -> Any:
    return ir.TensorType(ir.DataType.from_numpy(array.dtype))
