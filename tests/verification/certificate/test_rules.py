"""A rule may refuse, but what it says of its output must hold of numbers, whatever the symbolic dimensions are."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from math import prod

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from graphopt.numerics.rotations.claims import RotationClaim
from graphopt.verification.certificate.algebra import OWN_RULES, RULES
from graphopt.verification.certificate.coordinates import Coordinates, Tag, canonical, in_blocks, same_coordinates
from graphopt.verification.certificate.rotations import Rotations, of_claim
from graphopt.verification.certificate.site import Dims, RefusalError, Site, static

# What symbolic dimensions are at run time. They differ, so that a mix of two shows.
SIZES = {"batch": 2, "length": 3, "batch*length": 6, "2*batch": 4, "2*length": 6, "4*length": 12}
TOLERANCE = 1e-12  # sums of a few float64 numbers of order 1

Array = np.ndarray


def make_rotations() -> Rotations:
    """Rotations 1, 2, 3 of widths 2, 3, 4."""
    rotations = Rotations()
    for width in (2, 3, 4):
        rotations.number(of_claim(RotationClaim(kind="random", width=width, seed=width)))
    return rotations


ROTATIONS = make_rotations()


def real(dims: Dims) -> tuple[int, ...]:
    return tuple(SIZES[dim] if isinstance(dim, str) else dim or 1 for dim in dims)


def turn(tag: Tag, array: Array) -> Array:
    """Return x' of x, by the labels repeated along the symbolic dimensions."""
    if tag is None:
        return array
    wide = tag.spread(array.shape)
    return wide.apply(array.reshape(-1, 1), ROTATIONS).reshape(array.shape)


def value(name: str, dims: Dims) -> ir.Value:
    return ir.val(name, ir.DataType.FLOAT, ir.Shape(dims))


def site(
    op_type: str,
    inputs: Sequence[tuple[Dims, Tag] | Array | None],
    outputs: Sequence[Dims],
    **attributes: object,
) -> Site:
    values, tags, constants = [], [], {}
    for index, entry in enumerate(inputs):
        if isinstance(entry, np.ndarray):
            tensor = ir.tensor(entry)
            constants[index] = (tensor, tensor)
            values.append(ir.val(f"c{index}", const_value=tensor))
        else:
            values.append(None if entry is None else value(f"x{index}", entry[0]))
        tags.append(entry[1] if isinstance(entry, tuple) else None)
    node = ir.node(op_type, values, attributes, num_outputs=len(outputs), name="here")  # type: ignore[arg-type]
    for index, (out, dims) in enumerate(zip(node.outputs, outputs, strict=True)):
        out.name, out.dtype, out.shape = f"y{index}", ir.DataType.FLOAT, ir.Shape(dims)

    def no_weights(*_: object) -> None:
        raise AssertionError("no weight takes part")

    return Site(node, node, tags, [None] * len(outputs), constants, ROTATIONS, no_weights, no_weights)


def outcome(case: Site) -> list[Tag] | None:
    """Return what the rule says, or nothing where it refuses, or where what it says is refused by the walk."""
    try:
        tags = (RULES | OWN_RULES)[case.node.op_type](case)
    except (RefusalError, ValueError, IndexError):
        return None
    for index, tag in enumerate(tags):
        if tag is not None and (tag.shape != case.output_shape(index) or not tag.is_complete(ROTATIONS)):
            return None
    return tags


def accept(case: Site) -> list[Tag]:
    tags = outcome(case)
    assert tags is not None
    return tags


def holds(case: Site, function: Callable[..., Array | list[Array]], *shapes: Dims) -> bool:
    """Return whether the rule has an answer, and assert that it is right for random numbers."""
    tags = outcome(case)
    if tags is None:
        return False
    random = np.random.default_rng(0)
    arrays = [random.standard_normal(real(dims)) for dims in shapes]
    rotated_arrays = [turn(tag, array) for tag, array in zip(case.tags, arrays, strict=False)]
    before, after = (function(*operands) for operands in (arrays, rotated_arrays))
    pairs = zip(before, after, strict=True) if isinstance(before, list) else [(before, after)]
    for tag, (plain_array, rotated_array) in zip(tags, pairs, strict=False):
        np.testing.assert_allclose(turn(tag, plain_array), rotated_array, atol=TOLERANCE)
    return True


FOLLOWED_COUNTS: Counter[str] = Counter()
REFUSED_COUNTS: Counter[str] = Counter()


def tally(subject: str, is_followed: bool) -> None:
    """A rule may refuse what it cannot follow; see the fixture below."""
    event(f"{subject} {'followed' if is_followed else 'refused'}")
    (FOLLOWED_COUNTS if is_followed else REFUSED_COUNTS)[subject] += 1


@pytest.fixture(autouse=True)
def no_rule_refuses_every_example() -> Iterator[None]:
    FOLLOWED_COUNTS.clear()
    REFUSED_COUNTS.clear()
    yield
    assert set(REFUSED_COUNTS) <= set(FOLLOWED_COUNTS)


@st.composite
def tensors(draw: st.DrawFn) -> tuple[Dims, Coordinates]:
    """A shape with symbolic dimensions, and labels along one or two of its axes, somewhere."""
    width = draw(st.sampled_from([2, 3, 4]))
    inner = draw(st.sampled_from([(width,), (2 * width,), (2, width), (width, 1), (2, 2 * width)]))
    if prod(inner) == 4 and draw(st.booleans()):
        width, inner = 4, (2, 2)
    labels = in_blocks({2: 1, 3: 2, 4: 3}[width], width, prod(inner)).labels.reshape(3, *inner)
    if draw(st.booleans()) and prod(inner) > width:
        # some coordinates stay as they are
        labels = labels * (labels[1] > 1)
    outer: tuple[str | int, ...] = draw(st.sampled_from([(), ("batch",), ("batch", "length"), ("length", 2), (3,)]))
    tag = canonical(labels)
    assert tag is not None
    dims = (*outer, *inner)
    tag = tag.spread(static(dims))
    order = draw(st.permutations(range(len(dims))))
    moved_tag = tag.move(lambda plane: plane.transpose(order))
    assert moved_tag is not None
    return tuple(dims[axis] for axis in order), moved_tag


@st.composite
def targets(draw: st.DrawFn, source: Dims) -> Dims:
    """Shapes that as many elements fit: regrouped, with names of products, and at times in another order."""
    dims: list[int | str] = [dim for dim in source if dim is not None]
    for _ in range(draw(st.integers(0, 3))):
        kind = draw(st.sampled_from(["merge", "cut", "one", "swap"]))
        index = draw(st.integers(0, max(0, len(dims) - 1)))
        pair = dims[index : index + 2]
        if kind == "one":
            dims.insert(index, 1)
        elif kind == "swap" and len(pair) == 2:
            dims[index : index + 2] = pair[::-1]
        elif kind == "cut" and isinstance(dims[index], int) and int(dims[index]) % 2 == 0:
            dims[index : index + 1] = [2, int(dims[index]) // 2]
        elif kind == "merge" and len(pair) == 2:
            if all(isinstance(dim, int) for dim in pair):
                dims[index : index + 2] = [int(pair[0]) * int(pair[1])]
            else:
                size = prod(real(tuple(pair)))
                dims[index : index + 2] = [next((name for name, length in SIZES.items() if length == size), None) or 1]
    return tuple(dims)


@given(tensor=tensors(), data=st.data())
@settings(max_examples=400)
def test_reshape(tensor: tuple[Dims, Coordinates], data: st.DataObject) -> None:
    dims, _ = tensor
    target = data.draw(targets(dims))
    assume(prod(real(target)) == prod(real(dims)))
    case = site("Reshape", [tensor, np.array([0])], [target])
    tally("reshape", holds(case, lambda x: x.reshape(real(target)), dims))


@given(tensor=tensors(), data=st.data())
@settings(max_examples=100)
def test_transpose(tensor: tuple[Dims, Coordinates], data: st.DataObject) -> None:
    dims, _ = tensor
    order = data.draw(st.permutations(range(len(dims))))
    case = site("Transpose", [tensor], [tuple(dims[axis] for axis in order)], perm=order)
    assert holds(case, lambda x: x.transpose(order), dims)


@given(tensor=tensors(), data=st.data())
@settings(max_examples=200)
def test_split_and_slice(tensor: tuple[Dims, Coordinates], data: st.DataObject) -> None:
    dims, _ = tensor
    axis = data.draw(st.integers(0, len(dims) - 1))
    size = dims[axis]
    if isinstance(size, int) and size > 1:
        cut = data.draw(st.integers(1, size - 1))
        parts = [tuple(part if a == axis else dim for a, dim in enumerate(dims)) for part in (cut, size - cut)]
        case = site("Split", [tensor, np.array([cut, size - cut])], parts, axis=axis)
        tally("split", holds(case, lambda x: np.split(x, [cut], axis), dims))
    start, step = data.draw(st.integers(0, 1)), data.draw(st.sampled_from([1, 2, -1]))
    region = (slice(None),) * axis + (slice(start, 100, step) if step > 0 else slice(None, start, step),)
    ends = [100 if step > 0 else start]
    starts = [start if step > 0 else 100]
    count = len(range(real(dims)[axis])[region[-1]])
    if count:
        out = tuple(count if a == axis else dim for a, dim in enumerate(dims))
        case = site("Slice", [tensor, *(np.array(v) for v in (starts, ends, [axis], [step]))], [out])
        tally("slice", holds(case, lambda x: x[region], dims))


@given(tensor=tensors(), data=st.data())
@settings(max_examples=100)
def test_expand_gather_and_sums(tensor: tuple[Dims, Coordinates], data: st.DataObject) -> None:
    dims, _ = tensor
    axis = data.draw(st.integers(0, len(dims) - 1))
    wide: Dims = (2, *(3 if dim == 1 else dim for dim in dims))
    assert holds(site("Expand", [tensor, np.array([0])], [wide]), lambda x: np.broadcast_to(x, real(wide)), dims)
    index = np.array([[0, 0, 1]]) % real(dims)[axis]
    out = (*dims[:axis], 1, 3, *dims[axis + 1 :])
    case = site("Gather", [tensor, ((1, 3), None)], [out], axis=axis)
    tally("gather", holds(case, lambda x: x.take(index, axis), dims))
    rows = np.array([[0], [1], [1]]) % real(dims)[0]
    case = site("GatherND", [tensor, (("length", 1), None)], [("length", *dims[1:])])
    tally("rows", holds(case, lambda x: x[rows[:, 0]], dims))
    keeps_axis = data.draw(st.booleans())
    out = (*dims[:axis], *((1,) if keeps_axis else ()), *dims[axis + 1 :])
    case = site("ReduceSum", [tensor, np.array([axis])], [out], keepdims=int(keeps_axis))
    tally("sum", holds(case, lambda x: x.sum(axis, keepdims=keeps_axis), dims))


@given(tensor=tensors(), other_tensor=tensors(), data=st.data())
@settings(max_examples=200)
def test_concat_and_add(
    tensor: tuple[Dims, Coordinates], other_tensor: tuple[Dims, Coordinates], data: st.DataObject
) -> None:
    dims, tag = tensor
    axis = data.draw(st.integers(0, len(dims) - 1))
    second = data.draw(st.sampled_from([(dims, tag), (dims, None), other_tensor]))
    size = dims[axis]
    if len(second[0]) == len(dims) and all(
        a == axis or x == y for a, (x, y) in enumerate(zip(dims, second[0], strict=True))
    ):
        total = size + second[0][axis] if isinstance(size, int) and isinstance(second[0][axis], int) else None
        out = (*dims[:axis], total, *dims[axis + 1 :])
        case = site("Concat", [tensor, second], [out], axis=axis)
        tally("concat", holds(case, lambda x, y: np.concatenate([x, y], axis), dims, second[0]))
    if second[0] == dims:
        case = site("Add", [tensor, second], [dims])
        assert holds(case, np.add, dims, dims) == (second[1] is not None and second[1].key() == tag.key())


@given(tensor=tensors(), data=st.data())
@settings(max_examples=100)
def test_products_with_factors(tensor: tuple[Dims, Coordinates], data: st.DataObject) -> None:
    dims, tag = tensor
    factor = tuple(dim if data.draw(st.booleans()) else 1 for dim in dims)
    is_followed = holds(site("Mul", [tensor, (factor, None)], [dims]), np.multiply, dims, factor)
    assert is_followed == all(factor[axis] == 1 for axis in tag.spanned_axes())
    assert not holds(site("Div", [(factor, None), tensor], [dims]), np.divide, factor, dims)
    condition = np.random.default_rng(1).standard_normal(real(factor)) > 0
    case = site("Where", [(factor, None), tensor, np.zeros((), np.float32)], [dims])
    is_chosen = holds(case, lambda _, x: np.where(condition, x, 0), factor, dims)
    assert is_chosen == is_followed


def matmul_of(a: tuple[Dims, Tag], b: tuple[Dims, Tag]) -> Site:
    batch = np.broadcast_shapes(static(a[0][:-2]), static(b[0][:-2]))
    symbols = [dim for dim in (*a[0][:-2], *b[0][:-2]) if isinstance(dim, str)]
    lead = tuple(symbols[0] if symbols and size == 1 else size for size in batch)
    return site("MatMul", [a, b], [(*lead, a[0][-2], b[0][-1])])


def test_products_of_activations() -> None:
    along_rows = in_blocks(3, 4, 8)  # two copies of width 4
    other_labels = in_blocks(1, 2, 8)
    a = (("batch", 2, "length", 8), along_rows.spread((1, 2, 1, 8)))
    right = Coordinates(along_rows.labels[:, :, None])
    b = (("batch", 2, 8, "length"), right.spread((1, 2, 8, 1)))
    assert holds(matmul_of(a, b), np.matmul, a[0], b[0])
    # one batch entry for all, as for repeated keys
    assert holds(matmul_of(a, ((8, "length"), right.spread((8, 1)))), np.matmul, a[0], (8, "length"))
    scores = (("batch", 2, "length", 3), None)
    values = (("batch", 2, 3, 8), along_rows.spread((1, 2, 3, 8)))
    assert holds(matmul_of(scores, values), np.matmul, scores[0], values[0])
    wrong = Coordinates(other_labels.labels[:, :, None])
    for pair in (
        (a, (b[0], wrong.spread((1, 2, 8, 1)))),
        (a, (b[0], None)),
        ((a[0], None), b),
        (a, (("batch", 2, 8, 8), along_rows.spread((1, 2, 8, 8)))),
        (((2, "length", 8), in_blocks(3, 4, 16).spread((1, 16)).move(lambda p: p.reshape(2, 1, 8))), ((8, 3), None)),
        (scores, (("batch", 2, 3, 8), Coordinates(in_blocks(2, 3, 48).labels.reshape(3, 1, 2, 3, 8)))),
    ):
        assert outcome(matmul_of(*pair)) is None


def test_a_rotation_across_batch_entries_does_not_pass_a_product() -> None:
    numbers = in_blocks(1, 2, 48).labels.reshape(3, 1, 3, 8, 2).transpose(0, 1, 4, 2, 3)
    tag = canonical(numbers)
    assert tag is not None
    assert tag.spanned_axes() == {1}
    assert outcome(matmul_of((("batch", 2, "length", 3), None), (("batch", 2, 3, 8), tag))) is None


def test_a_norm_passes_rows_and_nothing_else() -> None:
    def norm(x: Array) -> Array:
        return x / np.sqrt((x**2).mean(-1, keepdims=True))

    tag = in_blocks(3, 4, 8)
    dims: Dims = ("batch", 2, 8)
    tensor, gain = (dims, tag.spread((1, 2, 8))), np.full(8, 2.0)
    assert holds(site("RMSNormalization", [tensor, gain], [dims], axis=-1), norm, dims)
    assert holds(site("RMSNormalization", [tensor, gain], [dims], axis=2), norm, dims)
    assert outcome(site("RMSNormalization", [tensor, gain], [dims], axis=1)) is None
    assert outcome(site("RMSNormalization", [tensor, np.arange(8.0)], [dims], axis=-1)) is None
    across = (dims, canonical(in_blocks(3, 4, 16).labels.reshape(3, 8, 2).transpose(0, 2, 1)[:, None]))
    assert outcome(site("RMSNormalization", [across, gain], [dims], axis=-1)) is None


def attend(q: Array, k: Array, v: Array) -> Array:
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat(group, axis=1) for x in (k, v))
    scores = np.exp(q @ k.swapaxes(-1, -2))
    return scores / scores.sum(-1, keepdims=True) @ v


QUERY, KEYS = ("batch", 4, "length", 4), ("batch", 2, "2*length", 4)


def per_head(heads: int, *numbers: int) -> Tag:
    """Labels [1, heads, 1, 4], by head the number of a rotation, or 0."""
    labels = np.zeros((3, 1, heads, 1, 4), np.int64)
    for head, number in enumerate(numbers):
        if number:
            labels[:, 0, head, 0] = in_blocks(number, {1: 2, 3: 4}[number], 4).labels
            labels[1, 0, head, 0] += 10 * head
    return canonical(labels)


@pytest.mark.parametrize("heads", list(itertools.product([0, 1, 3], repeat=2)))
@pytest.mark.parametrize("values", list(itertools.product([0, 3], repeat=2)))
def test_attention_head_by_head(heads: tuple[int, int], values: tuple[int, int]) -> None:
    keys, value_tag = per_head(2, *heads), per_head(2, *values)
    for queries in itertools.product([0, 1, 3], repeat=4):
        inputs = [(QUERY, per_head(4, *queries)), (KEYS, keys), (KEYS, value_tag)]
        is_followed = holds(site("Attention", inputs, [QUERY]), attend, QUERY, KEYS, KEYS)
        assert is_followed == (queries == tuple(np.repeat(heads, 2)))


def test_attention_with_heads_in_one_axis() -> None:
    query, keys = ("batch", "length", 16), ("batch", "2*length", 8)
    q = canonical(per_head(4, 3, 3, 1, 1).labels.reshape(3, 1, 1, 16))  # type: ignore[union-attr]
    k = canonical(per_head(2, 3, 1).labels.reshape(3, 1, 1, 8))  # type: ignore[union-attr]

    def attend_rows(q: Array, k: Array, v: Array) -> Array:
        q, k, v = (x.reshape(*x.shape[:2], -1, 4).swapaxes(1, 2) for x in (q, k, v))
        return attend(q, k, v).swapaxes(1, 2).reshape(2, 3, 16)

    inputs = [(query, q), (keys, k), (keys, k)]
    case = site("Attention", inputs, [query], q_num_heads=4, kv_num_heads=2)
    assert holds(case, attend_rows, query, keys, keys)
    case = site("Attention", [(query, k), *inputs[1:]], [query], q_num_heads=4, kv_num_heads=2)
    assert outcome(case) is None


def test_a_mask_in_other_coordinates_is_refused() -> None:
    mask = (("length", 8), in_blocks(3, 4, 8).spread((1, 8)))
    inputs: list[tuple[Dims, Tag]] = [(QUERY, None), (KEYS, None), (KEYS, None)]
    assert outcome(site("Attention", [*inputs, mask], [QUERY])) is None


def test_the_past_is_in_the_coordinates_of_what_is_new() -> None:
    tag, cache = per_head(2, 3, 3), ("batch", 2, "length", 4)
    q = per_head(4, 3, 3, 3, 3)
    inputs = [(QUERY, q), (KEYS, tag), (KEYS, tag), None, (cache, tag), (cache, tag)]
    outputs = [QUERY, ("batch", 2, None, 4), ("batch", 2, None, 4)]
    y, key, value_ = accept(site("Attention", inputs, outputs))
    assert same_coordinates(key, tag)
    assert same_coordinates(value_, tag)
    assert same_coordinates(y, q)
    for wrong in (None, per_head(2, 3, 0)):
        for number in (4, 5):
            wrong_inputs = [(cache, wrong) if i == number else entry for i, entry in enumerate(inputs)]
            assert outcome(site("Attention", wrong_inputs, outputs)) is None


ROWS, TOKENS, OF_STATE = ("batch", "length", 2, 3), ("batch", "length", 2, 4), ("batch", 2, 3, 4)


def recur(q: Array, k: Array, v: Array, g: Array, b: Array, mask: Array, state: Array) -> list[Array]:
    """Return outputs and state of a gated delta rule."""
    outputs = []
    for t in range(v.shape[1]):
        state = np.exp(g[:, t, ..., None]) * state
        recall = np.einsum("bhkv,bhk->bhv", state, k[:, t])
        state = state + np.einsum("bhk,bhv->bhkv", k[:, t], b[:, t] * (v[:, t] - recall))
        outputs.append(np.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return [np.stack(outputs, 1), state]


@pytest.mark.parametrize("values", list(itertools.product([0, 1, 3], repeat=2)))
@pytest.mark.parametrize("state", [(0, 0), (3, 1), (3, 3)])
def test_a_recurrence_sums_up_values_head_by_head(values: tuple[int, int], state: tuple[int, int]) -> None:
    labels = [per_head(2, *numbers) for numbers in (values, state)]
    of_value = None if labels[0] is None else canonical(labels[0].labels.transpose(0, 1, 3, 2, 4))
    of_state = None if labels[1] is None else labels[1].spread((1, 2, 3, 4))
    weights: list[tuple[Dims, Tag]] = [(ROWS, None), (ROWS, None)]
    gates: list[tuple[Dims, Tag]] = [(("batch", "length", 2, size), None) for size in (3, 1)]
    inputs = [*weights, (TOKENS, of_value), *gates, (("batch", 0), None), (OF_STATE, of_state)]
    case = site("LinearRecurrence", inputs, [TOKENS, OF_STATE], delta=1, scale=1.0)
    is_followed = holds(case, recur, ROWS, ROWS, TOKENS, *(dims for dims, _ in gates), ("batch", 0), OF_STATE)
    assert is_followed == (values == state)


@pytest.mark.parametrize("index", [0, 1])
def test_rotated_keys_and_queries_of_a_recurrence_are_refused(index: int) -> None:
    rows: Dims = ("batch", "length", 2, 4)
    tag = canonical(per_head(2, 3, 3).labels.transpose(0, 1, 3, 2, 4))  # type: ignore[union-attr]
    empty_gates: list[tuple[Dims, Tag]] = [(("batch", "length", 2, 0), None)] * 2
    inputs = [(rows, None), (rows, None), (rows, None), *empty_gates, (("batch", 0), None), (("batch", 2, 4, 4), None)]
    inputs[index] = (rows, tag)
    case = site("LinearRecurrence", inputs, [rows, ("batch", 2, 4, 4)], delta=0, scale=1.0)
    assert outcome(case) is None


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (("batch", 4, "length", 4), ("batch", "length", 16)),
        (("batch", "length", 8), ("batch", "2*length", 4)),
        (("batch", 4, "length", 4), ("length", 4, "batch", 4)),
        (("batch", "length", 4), ("4*length", "batch")),
    ],
)
def test_reshapes_that_mix_what_labels_of_size_one_cannot_show(source: Dims, target: Dims) -> None:
    # Alternate heads are in different coordinates; a row of 8 has two copies.
    heads = per_head(4, 3, 1, 3, 1) if source[1] == 4 else in_blocks(3, 4, int(source[-1] or 0)).spread(static(source))
    assert outcome(site("Reshape", [(source, heads), np.array([0])], [target])) is None


@pytest.mark.parametrize(
    "target",
    [("batch", "length", 4, 4), ("batch*length", 16), ("batch", 1, "length", 16), ("batch", "length", 2, 8)],
)
def test_the_usual_reshapes_are_followed(target: Dims) -> None:
    tag = per_head(4, 3, 1, 3, 1)
    assert tag is not None
    source: Dims = ("batch", "length", 16)
    tensor = (source, Coordinates(tag.labels.reshape(3, 1, 1, 16)))
    assert holds(site("Reshape", [tensor, np.array([0])], [target]), lambda x: x.reshape(real(target)), source)
