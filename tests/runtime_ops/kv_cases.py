"""Calls of KVAttention: random inputs, and a cache that is fed call by call by whatever runs the operator."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir
import onnxruntime
from hypothesis import strategies as st

from graphopt.ort.session import run
from graphopt.runtime_ops import DOMAIN, declare
from graphopt.runtime_ops.kv_attention.spec.attributes import LEVELS, PAGES, STORAGES, KVAttributes
from graphopt.runtime_ops.kv_attention.spec.policies import POLICIES
from graphopt.runtime_ops.kv_attention.spec.policies.retrieval import SUMMARIES
from graphopt.runtime_ops.kv_attention.spec.reference import reference
from graphopt.runtime_ops.kv_attention.spec.storages import STORAGE_OF
from tests.runtime_ops.kv_attention.bound import reference_and_bound

INPUTS = ("query", "key", "value", "past", "new", "sink_logits", "sink_query")
STATE = ("keys", "values", "scales", "recent", "summaries")
Arrays = dict[str, np.ndarray]
Run = Callable[..., Sequence[np.ndarray]]
"""Takes the inputs in order and the attributes by name, returns the six outputs."""


GPU_STORAGES = tuple(name for name, storage in STORAGE_OF.items() if storage.on_gpus)


def unit_of(storage: str) -> int:
    """Return what pages and heads are a multiple of: 16, or more where codes of a storage are packed together."""
    return max(16, STORAGE_OF[storage].unit if storage in LEVELS else 16)


PAIRS = (("int8", "int6"), ("int6", "int3"), ("int3", "int4"), ("int4", "int2"), ("int2", "int1"), ("int1", "int8"))
"""Keys and values that are stored in different ways: each storage of codes for either, more bits for keys and fewer."""


def attributes_of(**others: Any) -> KVAttributes:
    """Return attributes with pages of 16 tokens, or of as many more as the storages ask for."""
    options = {"kv_heads": 2, "scale": 0.25, "page": 16, "storage": "float32", **others}
    units = [unit_of(options[name]) for name in ("storage", "value_storage") if options.get(name)]
    return KVAttributes(**{**options, "page": max(options["page"], *units)})


def tokens_of(
    attributes: KVAttributes,
    columns: int,
    *,
    batch: int = 1,
    group: int = 2,
    head_size: int = 16,
    sink_logits: bool = False,
    sink_query: bool = False,
    seed: int = 0,
) -> Arrays:
    """Return query, key, value, sink_logits and sink_query for ``columns`` tokens; heads fit the storage."""
    unit = max(16, attributes.unit)
    head_size = -(-head_size // unit) * unit
    random, width = np.random.default_rng(seed), attributes.kv_heads * head_size
    normal = random.standard_normal
    return {
        "query": normal((batch, columns, group * width)).astype(np.float32),
        "key": normal((batch, columns, width)).astype(np.float32),
        "value": normal(0 if attributes.value_size else (batch, columns, width)).astype(np.float32),
        "sink_logits": normal(attributes.kv_heads * group if sink_logits else 0).astype(np.float32),
        "sink_query": normal((batch, columns, group * width) if sink_query else 0).astype(np.float32),
    }


@st.composite
def any_calls(
    draw: st.DrawFn,
    *,
    most: int,
    tokens: int,
    groups: Sequence[int],
    head_sizes: Sequence[int],
    storages: Sequence[str] = STORAGES,
    has_factors: bool = True,
    has_feedback: bool = False,
    has_pairs: bool = True,
    policies: int = len(POLICIES),
) -> tuple[KVAttributes, Arrays, list[int], list[list[int]]]:
    """Draw attributes, of the first ``policies``, and tokens for up to ``most`` calls of up to ``tokens`` columns each.

    Returns:
        attributes, what ``tokens_of`` returns for all columns, columns by call, and new tokens by call and row.
    """
    heads, compensate, stride = draw(st.integers(1, 3)), draw(st.integers(0, 1)), draw(st.sampled_from([1, 3, 8]))
    storage = draw(st.sampled_from(storages))
    attributes = attributes_of(
        storage=storage,
        value_storage=draw(st.sampled_from(["", *LEVELS])) if has_pairs and storage in LEVELS else "",
        clip=draw(st.sampled_from([1.0, 1.0, 0.7, 0.1])) if storage in LEVELS else 1.0,
        token_factors=draw(st.integers(0, 1)) if has_factors and storage in LEVELS else 0,
        key_feedback=draw(st.integers(0, 1)) if has_feedback and storage in LEVELS else 0,
        kv_heads=heads,
        page=draw(st.sampled_from(PAGES)),
        policies=draw(st.lists(st.integers(0, policies - 1), min_size=heads, max_size=heads)),
        window=0 if compensate else draw(st.sampled_from([0, 0, 1, 17, 60])),
        mass=draw(st.sampled_from([0.0, 0.0, 0.3, 0.95, 1.0])),
        channels=draw(st.sampled_from([0, 0, 1, 9, 100])),
        prefill_mass=draw(st.sampled_from([0.3, 0.8, 1.0])),
        query_block=stride * draw(st.sampled_from([1, 2, 3])),
        query_stride=stride,
        compensate=compensate,
        summary=draw(st.sampled_from(SUMMARIES)),
        softcap=draw(st.sampled_from([0.0, 2.0])),
        sinks=draw(st.integers(0, 40)),
        recent=draw(st.integers(1, 40)),
        budget=draw(st.integers(0, 3)),
        sink_pages=draw(st.integers(0, 2)),
        recent_pages=draw(st.integers(0, 2)),
    )
    batch, calls = draw(st.integers(1, 2)), draw(st.lists(st.integers(0, tokens), min_size=1, max_size=most))
    drawn = tokens_of(
        attributes,
        sum(calls),
        batch=batch,
        group=draw(st.sampled_from(groups)),
        head_size=draw(st.sampled_from(head_sizes)),
        sink_logits=draw(st.booleans()),
        sink_query=draw(st.booleans()),
        seed=draw(st.integers(0, 9)),
    )
    new = [draw(st.lists(st.integers(0, n), min_size=batch, max_size=batch)) for n in calls]
    return attributes, drawn, calls, new


def feedback_of(attributes: KVAttributes, head_size: int) -> Arrays:
    """Return the input ``feedback`` of a node that has one, with numbers at places that no operator reads."""
    if not attributes.key_feedback:
        return {}
    random = np.random.default_rng(head_size)
    return {"feedback": random.uniform(-0.5, 0.5, (attributes.kv_heads, head_size, head_size)).astype(np.float16)}


def names_of(attributes: KVAttributes) -> tuple[str, ...]:
    """Return the names of the inputs of a node, in order."""
    return (*INPUTS, *STATE, *(["feedback"] if attributes.key_feedback else []))


class Fed:
    """A cache, fed call by call, and what the calls returned.

    Args:
        attributes: of the operator.
        tokens: as from :func:`tokens_of`; each call takes the next columns.
        pages: P.
        run: what computes the operator.
    """

    def __init__(self, attributes: KVAttributes, tokens: Arrays, pages: int, run: Run = reference) -> None:
        self.attributes, self.tokens, self.run = attributes, tokens, run
        batch, _, width = tokens["key"].shape
        self.state = attributes.state(batch, pages, width // attributes.kv_heads).zeros()
        self.past = np.zeros(batch, np.int64)
        self.column = 0
        self.feedback = feedback_of(attributes, width // attributes.kv_heads)

    def call(self, columns: int, new: Sequence[int] | None = None) -> np.ndarray:
        """Run the next ``columns`` columns, of which row b has ``new[b]`` tokens, all by default; return y."""
        these = slice(self.column, self.column + columns)
        inputs = {"past": self.past, "new": np.full(len(self.past), columns) if new is None else np.array(new)}
        for name, tensor in self.tokens.items():
            inputs[name] = tensor[:, these] if tensor.ndim == 3 else tensor
        arguments = [*(inputs[name] for name in INPUTS), *self.state.values(), *self.feedback.values()]
        y, *state = self.run(*arguments, **self.attributes.for_node())
        self.state = dict(zip(STATE, state, strict=True))
        self.past = self.past + inputs["new"]
        self.column += columns
        return y

    def calls(self, *columns: int) -> np.ndarray:
        """Run one call after the other and return their y, one behind the other."""
        return np.concatenate([self.call(each) for each in columns], axis=1)


class Bounded:
    """Runs the reference, and keeps how far from it a kernel may be; the same call is computed once for all kernels."""

    most: np.ndarray
    _newest: ClassVar[dict[bytes, tuple[tuple[np.ndarray, ...], np.ndarray]]] = {}

    def __call__(self, *inputs: np.ndarray, **attributes: Any) -> tuple[np.ndarray, ...]:
        digest = hashlib.sha256(repr(sorted(attributes.items())).encode())
        for array in inputs:
            digest.update(f"{array.dtype} {array.shape}".encode() + array.tobytes())
        key, newest = digest.digest(), self._newest
        if key not in newest:
            if len(newest) >= 64:  # a test has fewer calls, and the next one is the same for other instructions
                del newest[next(iter(newest))]
            newest[key] = reference_and_bound(*inputs, **attributes)
        results, self.most = newest[key]
        return results


def assert_same_state(one: Arrays, other: Arrays) -> None:
    for name in STATE:
        assert one[name].dtype == other[name].dtype, name
        assert np.array_equal(one[name], other[name], equal_nan=one[name].dtype.kind in "fV"), name


def assert_float16_is_widened(wide: Run, narrow: Run, **options: Any) -> None:
    """``narrow`` takes and gives float16, and computes what ``wide`` does: the same state, and y rounded."""
    attributes = attributes_of(sinks=18, recent=20, **options)
    tokens = tokens_of(attributes, 60, batch=2, group=3, head_size=32, sink_logits=True, sink_query=True)
    halves = {name: tensor if name == "sink_logits" else tensor.astype(np.float16) for name, tensor in tokens.items()}
    floats = {name: tensor.astype(np.float32) for name, tensor in halves.items()}
    one, other = Fed(attributes, floats, 5, wide), Fed(attributes, halves, 5, narrow)
    for columns, *new in ((40, 40, 33), (1,), (7, 0, 7), (12,)):
        expected, y = one.call(columns, new or None), other.call(columns, new or None)
        assert (expected.dtype, y.dtype) == (np.float32, np.float16)
        assert np.array_equal(expected.astype(np.float16), y)
        assert_same_state(one.state, other.state)


def model_of(
    attributes: KVAttributes,
    shapes: dict[str, tuple[int | str | None, ...]],
    opset: int = 23,
    activations: ir.DataType = ir.DataType.FLOAT,
) -> ir.Model:
    """Return a graph of one node with inputs of these ``shapes``: lengths int64, states by storage, others floats."""
    whole = {"past": ir.DataType.INT64, "new": ir.DataType.INT64}
    whole |= dict.fromkeys(("query", "key", "value", "sink_query"), activations)
    for name, tensor in attributes.state("batch", "pages", max(16, attributes.unit, attributes.value_size)):
        whole[name] = ir.DataType.from_numpy(tensor.dtype)
    whole["feedback"] = ir.DataType.FLOAT16
    names = names_of(attributes)
    values = [ir.val(name, whole.get(name, ir.DataType.FLOAT), ir.Shape(shapes[name])) for name in names]
    node = ir.node(
        "KVAttention", values, attributes.for_node(), domain=DOMAIN, version=None, num_outputs=6, name="attention"
    )
    for output, like in zip(node.outputs, (values[0], *values[7:12]), strict=True):
        output.name, output.type, output.shape = f"present_{like.name}", like.type, like.shape
    node.outputs[0].name = "y"
    graph = ir.Graph(values, node.outputs, nodes=[node], opset_imports={"": opset}, name="one")
    model = ir.Model(graph, ir_version=11)
    declare(model)
    return model


def open_quietly(model: ir.Model) -> onnxruntime.InferenceSession:
    """Return a session of the model without a library of ours, which prints no errors: they are raised, too."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    serialized = ir.to_proto(model).SerializeToString()
    return onnxruntime.InferenceSession(serialized, options, providers=["CPUExecutionProvider"])


class Body:
    """Runs the operator's body in an onnxruntime without a library of ours.

    Tests share its sessions, one for each set of attributes and ranks: making one takes longer than its calls.

    Args:
        static: whether the graph states every dimension; else it names none.
        opset: of the graph and the body.
        activations: the type of query, key, value, `sink_query` and y.
    """

    _newest: ClassVar[dict[Any, onnxruntime.InferenceSession]] = {}

    def __init__(self, *, static: bool = False, opset: int = 23, activations: ir.DataType = ir.DataType.FLOAT) -> None:
        self.static, self.opset, self.activations = static, opset, activations

    def __call__(self, *inputs: np.ndarray, **attributes: Any) -> Sequence[np.ndarray]:
        attrs = KVAttributes(**attributes)
        by_name = dict(zip(names_of(attrs), inputs, strict=True))
        shapes: dict[str, Any] = {name: array.shape for name, array in by_name.items()}
        if not self.static:
            shapes = {name: [None] * len(shape) for name, shape in shapes.items()}
        key = (attrs, str(shapes), self.opset, self.activations)
        if key not in self._newest:
            if len(self._newest) >= 32:
                del self._newest[next(iter(self._newest))]
            self._newest[key] = open_quietly(model_of(attrs, shapes, self.opset, self.activations))
        return run(self._newest[key], None, by_name)
