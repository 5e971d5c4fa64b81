"""How far y of a ``KVAttention`` may be from its reference, and how far a storage of integers from floats; derived.

Both say: a token whose score errs by at most e_j, rounding of its weight included, weighs p'_j in place of p_j. As
weights are divided by their sum, with a = sum p_j e^e_j and b = sum p_j e^-e_j over all tokens read and the sink,

    e^-e_j / a <= p'_j / p_j <= e^e_j / b,   so   |p'_j - p_j| <= p_j r_j,  r_j = max(e^e_j / b - 1, 1 - e^-e_j / a),

and y errs by sum p_j r_j |v_j| for this, plus what the values err by, times p_j (1 + r_j). Where scores are large and
err by more than a little, another bound is the smaller one: no set of tokens gains more than tanh(e / 2) of the weight,
with e the largest e_j, as its odds change by e^(2 e) at most. So y errs by at most 2 tanh(e / 2) max|v|.

Write u = 2^-24 and gamma(n) = n u / (1 - n u) (Higham 2002, Accuracy and stability, lemma 3.1). A stored number is
low + step code; a float is its own low.

**A kernel** computes in float32, in any order of sums, and may round what it multiplies codes with, for each query and
page, to integers of 15 bits: r = q_c step_c over the channels for scores, r = p_j step_j over the tokens for y. Then r
errs by half of max|r| / L, L = 2^14 - 1, and by a share of 4 u for the quotients, so its product with codes by

    max|r| (1 / (2 L) + 4 u) sum code.

- e_j = scale (that + gamma(D + 9) sum_c |q_c| (|low_c| + |step_c| code_c)) for the product, where D + 9 counts the
  products and sums of both parts, and the products with scale, step and the factor of a token. A softcap c has a slope
  of at most 1, and errs by 8 u c itself. A bias by distance is a product and a sum more. The
  difference to the largest score is rounded once, u |s_j - max s|; exp errs by 4 u of itself.
- The sums of y and of weights meet at most N + 4 n + 16 roundings each, for N tokens read on n pages: a page's sum is
  rescaled when a larger score comes, and pages are merged. So gamma(2 (N + 4 n + 16)) of the sum of magnitudes
  p'_j (|low_j| + |step_j| code_j), and of what rounding r adds. Where results are subnormal each errs by 2^-150 more.
- What is below e^-87 of the largest weight, or in r below 1e-30, may count as that or as nothing.

**A storage of integers** gives x back within step (1/2 + 5 u levels): (x - low) (levels / span) meets 3 roundings,
each of at most u levels steps, and step and span one each; x / factor of a token one more, of u of itself. A float of s
significant bits and a least exponent e gives x back within a share of 2^-s of what it stores for x (Higham, theorem
2.3), or within half of its least number, 2^(e - s): float16 has s = 11 and e = -14, bfloat16 8 and -126, float8 4 and
-6. A float8 of 448 may stand for anything above. Pages that retrieval chooses are the same, as summaries are made of
the float keys. So e_j = scale sum_c |q_c| step_c (1/2 + 5 u levels), and a value errs by step_j (1/2 + 5 u levels).

**A token that stands for those that streaming dropped** has a mean that errs as :mod:`.compensation` says, so its score
by scale sum_c |q_c| err_c more, and log N errs by 2 u of itself, their sum by u. Its value errs by p'_j err.

A bound holds if both sides choose the same pages: where two scores of pages are within float32 rounding of each other
retrieval may read the other one. Where rounding may change how many pages hold `mass`, or which pages a block of
queries leaves out, the bound is infinite.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from graphopt.runtime_ops.kv_attention.spec.attributes import KVAttributes
from graphopt.runtime_ops.kv_attention.spec.compensation import UNIT
from graphopt.runtime_ops.kv_attention.spec.policies.policy import candidate_pages
from graphopt.runtime_ops.kv_attention.spec.policies.retrieval import Retrieval, page_weights
from graphopt.runtime_ops.kv_attention.spec.policies.sparse_prefill import SparsePrefill
from graphopt.runtime_ops.kv_attention.spec.readings import Mask, Reading, StoredNumbers, read_mask, readings
from graphopt.runtime_ops.kv_attention.spec.reference import attend, for_each
from graphopt.runtime_ops.kv_attention.spec.weights import biases, dense_weights, of_queries, scores, softmax_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Array = npt.NDArray[Any]
Doubles = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

LEVELS = 2**14 - 1
"""The largest integer of 15 bits, with its sign."""

_SMALLEST_WEIGHT = float(np.exp(-87))
_SMALLEST_FACTOR = 1e-30
_SMALLEST_ERROR = 2.0**-150


def bound(*inputs: Array, **attributes: Any) -> Doubles:
    """Return the largest |y - reference| that the operator allows, from its inputs and attributes.

    Returns:
        float64 [B, S, Hq D]; infinite where a query or what it reads is not finite, or a float32 may overflow.

    Raises:
        ValueError: as the reference.
    """
    attrs = KVAttributes(**attributes)
    return _limits(_of_kernel, attrs, inputs, readings(attrs, inputs)[1])


def reference_and_bound(*inputs: Array, **attributes: Any) -> tuple[tuple[Array, ...], Doubles]:
    """Return what the reference and :func:`bound` return; both share what the queries find, which takes most time.

    Raises:
        ValueError: as the reference.
    """
    attrs = KVAttributes(**attributes)
    state, each = readings(attrs, inputs)
    every = list(each)
    y = for_each(attend, attrs, inputs, every)
    return (y, *state.values()), _limits(_of_kernel, attrs, inputs, every)


def storage_bound(*inputs: Array, **attributes: Any) -> Doubles:
    """Return the largest distance, of exact arithmetic, between y of this state and y of one that rounds nothing.

    Returns:
        float64 [B, S, Hq D]; infinite where a query or something that it reads is not finite.

    Raises:
        ValueError: as the reference.
    """
    attrs = KVAttributes(**attributes)
    return _limits(_of_storage, attrs, inputs, readings(attrs, inputs)[1])


def _limits(
    limit: Callable[[KVAttributes, Reading], Doubles],
    attrs: KVAttributes,
    inputs: tuple[Array, ...],
    every: Iterable[Reading],
) -> Doubles:
    past, new = inputs[3:5]

    def of_reading(attrs: KVAttributes, reading: Reading) -> Doubles:
        last = int(past[reading.row] + new[reading.row])
        with np.errstate(all="ignore"):  # infinite is a limit too
            limits = limit(attrs, reading) + _open(attrs, reading, last - len(reading.q))
        return np.where(np.isfinite(limits), limits, np.inf)

    return for_each(of_reading, attrs, inputs, every)


def _open(attrs: KVAttributes, reading: Reading, first: int) -> Doubles:
    """Return infinity for queries that may read one page more or less for their `mass`, else 0, [n, 1, 1]."""
    opened = np.zeros((len(reading.q), 1, 1))
    policy = attrs.policy_of(reading.head)
    if isinstance(policy, Retrieval):
        for index, q in enumerate(reading.q):
            summaries = reading.summaries[candidate_pages(attrs, first + index)]
            if is_open(policy, attrs.scale, summaries, q):
                opened[index] = np.inf
    if isinstance(policy, SparsePrefill) and policy.chooses:
        _open_blocks(attrs, policy, reading, np.arange(first, first + len(reading.q)), opened)
    return opened


def _open_blocks(
    attrs: KVAttributes, policy: SparsePrefill, reading: Reading, query_positions: Integers, opened: Doubles
) -> None:
    """Write infinity for blocks of queries of which float32 may leave out other pages.

    Scores err by e, so weights by a share of exp(2 e) - 1, and sums of n weights by gamma(n).
    """
    no_summaries = np.zeros((attrs.kv_heads, 0, 0), np.float32)
    visible = read_mask(attrs, reading.head, no_summaries, reading.q, query_positions, reading.positions)
    dense = replace(reading, is_read=visible)
    weights, (magnitude, e) = dense_weights(attrs, dense), _product_errors(attrs, dense)
    fits = np.where(visible[:, None], magnitude, 0) < np.finfo(np.float32).max / 4
    for block in policy.whole_blocks(query_positions):
        of_pages, limit = policy.page_weights(attrs, weights, block, query_positions, reading.positions)
        if not np.isfinite(of_pages).all():
            continue
        # e of a score, and what its difference to the largest and exp add
        largest = np.where(visible[block, None], e[block], 0).max()
        spread = np.where(visible[block, None], np.abs(scores(attrs, dense)[block]), 0).max()
        share = np.expm1(2 * (largest + (4 + 2 * spread) * UNIT)) + (len(of_pages) + attrs.page + 16) * 2 * UNIT
        error = share * of_pages.sum() + 4 * UNIT * limit
        order = np.lexsort((-np.arange(len(of_pages)), of_pages))
        sums = np.cumsum(of_pages[order])
        count = int((sums < limit).sum())
        is_near = (np.abs(sums - limit) <= error).any()
        if 0 < count < len(order):
            last, first = of_pages[order[[count - 1, count]]]
            is_near = is_near or (first - last <= error and first > 0)
        if is_near or not fits[block].all():
            opened[block] = np.inf


def is_open(policy: Retrieval, scale: float, summaries: Array, queries: Doubles) -> bool:
    """Return whether float32 may find that the pages with `mass` are one more or one less.

    Scores err by gamma(D + 8) of the sum of magnitudes, so weights by a share of e = 2 scale times that, and 4 u; sums
    of n weights by gamma(n).
    """
    if not 0 < policy.mass < 1 or not len(summaries):
        return False
    channels = queries.shape[-1]
    low, high = policy.key_range(summaries, channels)
    with np.errstate(invalid="ignore", over="ignore"):
        magnitude = float((np.abs(queries) @ np.maximum(np.abs(low), np.abs(high)).T).max())
    share = 2 * abs(scale) * (channels + 8) * UNIT * magnitude + (len(summaries) + 8) * UNIT
    weights = np.sort(page_weights(policy.page_scores(summaries, queries), scale))[::-1]
    sums = np.cumsum(weights)[: policy.budget or None]
    return not (np.abs(sums - policy.mass * weights.sum()) > 4 * share * weights.sum()).all()


def _products(attrs: KVAttributes, reading: Reading, numbers: Doubles) -> Doubles:
    """Return scale |q| . numbers for all stored tokens, [n, G, m], for numbers [m, D] that are not negative."""
    if not numbers.any():
        return np.zeros((*reading.q.shape[:2], len(numbers)))
    products = of_queries(attrs, reading, lambda query: np.abs(query) @ numbers.T)
    return products * abs(attrs.scale)


def _shares(reading: Reading, p: Doubles, e: Doubles, e_sink: Doubles) -> Doubles:
    """Return r_j, [n, G, m]; ``e_sink`` [n, G, 1] is the error of the sink's weight, if there is one."""
    e = np.where(reading.is_read[:, None], e, 0)
    # without a sink p sums to 1, up to rounding
    p_sink = 0.0 if reading.sink_logits is None else np.maximum(1 - p.sum(axis=-1, keepdims=True), 0)
    more, less = np.exp(e), np.exp(-e)
    a = (p * more).sum(axis=-1, keepdims=True) + p_sink * np.exp(e_sink)
    b = (p * less).sum(axis=-1, keepdims=True) + p_sink * np.exp(-e_sink)
    shares: Doubles = np.maximum(more / b - 1, 1 - less / a)
    return shares


def _of_storage(attrs: KVAttributes, reading: Reading) -> Doubles:
    p = softmax_weights(reading, scores(attrs, reading))
    e = _products(attrs, reading, _storage_error(attrs, reading.keys))
    r = _shares(reading, p, e, np.zeros(1))
    values, value_error = np.abs(reading.values.numbers), _storage_error(attrs, reading.values)
    of_values = np.minimum((p * (1 + r)) @ _read(value_error), _largest_read(reading, value_error))
    limit = _moved(reading, p, e, r, values, _largest_read(reading, values)) + of_values + _bad_reads(reading)
    if attrs.stored.largest is not None:
        cut_off = (np.abs(each.numbers) == attrs.stored.largest for each in (reading.keys, reading.values))
        limit = limit + _reads_of(reading, *cut_off)
    return limit


def _moved(reading: Reading, p: Doubles, e: Doubles, r: Doubles, values: Doubles, largest_value: Doubles) -> Doubles:
    """Return what y errs by if scores err by ``e``, [n, G, D].

    Args:
        reading: what the queries find.
        p: their weights, [n, G, m].
        e: by how much scores err, [n, G, m].
        r: r_j, [n, G, m].
        values: magnitudes, [m, D].
        largest_value: the largest of them that each query reads, [n, 1, D].
    """
    largest = np.where(reading.is_read[:, None], e, 0).max(axis=-1, keepdims=True, initial=0)
    moved: Doubles = np.minimum((p * r) @ _read(values), 2 * np.tanh(largest / 2) * largest_value)
    return moved


def _largest_read(reading: Reading, numbers: Doubles) -> Doubles:
    """Return the largest of ``numbers`` [m, D], none of them negative, that each query reads, [n, 1, D]."""
    numbers, is_read = _read(numbers), reading.is_read
    by_all = is_read.all(axis=0)
    by_some = is_read.any(axis=0) & ~by_all
    of_all = numbers[by_all].max(axis=0, initial=0)
    of_some = np.where(is_read[:, by_some, None], numbers[by_some], 0).max(axis=1, initial=0)
    largest: Doubles = np.maximum(of_some, of_all)
    return largest[:, None]


def _storage_error(attrs: KVAttributes, stored: StoredNumbers) -> Doubles:
    """Return how far the stored numbers are at most from what was stored, [m, D]."""
    if attrs.stored.significant is not None:
        known: Doubles = np.maximum(np.abs(stored.numbers), 2.0**attrs.stored.exponent)
        return known * 2.0**-attrs.stored.significant
    divided = UNIT * np.abs(stored.numbers) if attrs.token_factors else 0
    levels = max(attrs.levels or 0, attrs.value_levels or 0)
    return stored.step * (0.5 + 5 * UNIT * levels) + divided


def _of_kernel(attrs: KVAttributes, reading: Reading) -> Doubles:
    values, exact = reading.values, scores(attrs, reading)
    value_step = np.abs(values.step)
    magnitude, e = _product_errors(attrs, reading)
    read = np.where(reading.is_read[:, None], exact, -np.inf)
    top = read.max(axis=-1, keepdims=True, initial=-np.inf)
    if reading.sink_logits is not None:
        top = np.maximum(top, reading.sink_logits[:, None])
        e_sink = UNIT * (top - reading.sink_logits[:, None]) + 4 * UNIT
    else:
        e_sink = np.zeros_like(top)
    e = e + UNIT * (top - exact) + 4 * UNIT + 3 * UNIT * np.log(reading.counts)
    e = e + np.where(reading.counts > 1, UNIT * magnitude, 0) + _products(attrs, reading, reading.keys.error)
    p = softmax_weights(reading, exact)
    r = _shares(reading, p, e, e_sink)
    heavy = np.minimum(p * (1 + r), 1)
    rounding = np.zeros((*p.shape[:2], values.low.shape[1]))
    page = reading.positions // attrs.page
    pages = np.unique(page)
    for these in (page == each for each in (pages if values.codes.any() else ())):
        factor = (heavy * value_step[:, 0])[..., these].max(axis=-1, keepdims=True)
        of_codes = reading.is_read[:, these].astype(np.float64) @ values.codes[these]
        rounding += (factor * (0.5 / LEVELS + 4 * UNIT) + _SMALLEST_FACTOR) * of_codes[:, None]
    count = reading.is_read.sum(axis=-1)[:, None, None]
    known = np.abs(values.numbers)
    rounding += heavy @ _read(values.error)
    of_values = _read(np.abs(values.low) + value_step * values.codes)
    sums = heavy @ of_values + rounding
    roundings = 2 * (count + 4 * len(pages) + 16)
    gamma, largest_value = _gamma(roundings), _largest_read(reading, known)
    tiny = 2 * count * _SMALLEST_WEIGHT * largest_value + roundings * _SMALLEST_ERROR
    moved = _moved(reading, p, np.maximum(e, e_sink), r, known, largest_value)
    limit = moved + rounding + gamma * sums + tiny + _bad_reads(reading)
    fits = (np.where(reading.is_read[:, None], magnitude, 0) < np.finfo(np.float32).max / 4).all(axis=-1, keepdims=True)
    # until they are divided at the end, sums of a part have its largest weight as 1
    largest_value = _largest_read(reading, of_values) if value_step.any() else largest_value
    fits = fits & (count * largest_value < np.finfo(np.float32).max / 4)
    return np.where(fits, limit, np.inf)


def _product_errors(attrs: KVAttributes, reading: Reading) -> tuple[Doubles, Doubles]:
    """Return the magnitudes of what scores add up, and by how much the scores err, each [n, G, m]."""
    keys = reading.keys
    # a state may come from anywhere, so that steps may be negative
    key_step = np.abs(keys.step)
    magnitude = _products(attrs, reading, np.abs(keys.low) + key_step * keys.codes)
    codes = keys.codes.sum(axis=-1)
    largest = of_queries(attrs, reading, lambda query: _largest_factor(query, key_step)) * abs(attrs.scale)
    e = _gamma(keys.low.shape[1] + 9) * magnitude
    e = e + (largest * (0.5 / LEVELS + 4 * UNIT) + _SMALLEST_FACTOR) * codes + 8 * UNIT * attrs.softcap
    if attrs.slopes:
        of_distance = np.abs(biases(attrs, reading))
        magnitude, e = magnitude + of_distance, e + 2 * UNIT * (magnitude + of_distance)
    return magnitude, e


def _largest_factor(query: Doubles, step: Doubles) -> Doubles:
    """Return max_c |q_c| step_c for each query and token, [n, G, m], of steps that are not negative."""
    # The tokens of a page have the same steps: of each run of equal rows one is computed.
    begins = np.flatnonzero(np.append(True, (step[1:] != step[:-1]).any(axis=-1))[: len(step)])
    factors: Doubles = (np.abs(query)[..., None, :] * step[begins]).max(axis=-1)
    return factors.repeat(np.diff(begins, append=len(step)), axis=-1)


def _gamma(n: Any) -> Any:
    """Return what n roundings, an array or a number, make of one."""
    return n * UNIT / (1 - n * UNIT)


def _read(numbers: Doubles) -> Doubles:
    """Return numbers [m, D] with 0 where they are not finite, since a weight of 0 times those is NaN."""
    return np.where(np.isfinite(numbers), numbers, 0)


def _bad_reads(reading: Reading) -> Doubles:
    """Return infinity where something is read that is not finite, else 0, [n, 1, D]."""
    return _reads_of(reading, ~np.isfinite(reading.keys.numbers), ~np.isfinite(reading.values.numbers))


def _reads_of(reading: Reading, keys: Mask, values: Mask) -> Doubles:
    """Return infinity where one of the keys or values that a mask [m, D] marks is read, else 0, [n, 1, D]."""
    bad = keys.any(axis=-1, keepdims=True) | values
    if not bad.any():
        return np.zeros((len(reading.is_read), 1, bad.shape[1]))
    return np.where((reading.is_read.astype(np.int64) @ bad)[:, None] > 0, np.inf, 0.0)
