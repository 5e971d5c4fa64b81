"""What errors of channels of keys are made up for by, from the queries that read them."""

from __future__ import annotations

import numpy as np
import pytest

from graphopt.errors import InputError
from graphopt.quantization.rounding.ldl import key_feedback, moments_by_head, whitening
from graphopt.runtime_ops.kv_attention.spec.layout import round_with_feedback


def test_queries_of_a_head_of_keys_are_those_next_to_one_another() -> None:
    random, (tokens, heads, group, size) = np.random.default_rng(0), (50, 3, 2, 4)
    # heads of other sizes, so that none can stand for another
    queries = random.standard_normal((tokens, heads, group, size)) * np.arange(1, heads + 1)[:, None, None]
    rows = queries.reshape(tokens, -1)
    moments = moments_by_head(rows.T @ rows / tokens, heads, size)
    expected = np.einsum("thgd,thge->hde", queries, queries) / (tokens * group)
    # sums of 50 products in float64, in another order
    np.testing.assert_allclose(moments, expected, rtol=0, atol=1e-12)


def test_feedback_is_that_of_the_inverse_moments() -> None:
    random, damping = np.random.default_rng(0), 0.1
    queries = random.standard_normal((2, 90, 16)) @ random.standard_normal((16, 16))
    moments = np.swapaxes(queries, 1, 2) @ queries / 90
    for feedback, moment in zip(key_feedback(moments, damping), moments, strict=True):
        damped_moment = moment + damping * np.diagonal(moment).mean() * np.eye(16)
        # as GPTQ has it: rows of the upper factor of the inverse, each by its diagonal
        upper = np.linalg.cholesky(np.linalg.inv(damped_moment)).T
        expected = np.triu(upper / np.diag(upper)[:, np.newaxis], 1)
        # float16 has 11 significant bits
        np.testing.assert_allclose(feedback, expected, rtol=2**-11, atol=2**-11 * np.abs(expected).max())


def test_queries_that_are_all_zero_leave_channels_to_themselves() -> None:
    assert not key_feedback(np.zeros((1, 16, 16))).any()


@pytest.mark.parametrize("power", [0.0, 0.4, 1.0])
def test_keys_vary_more_alike_by_a_power_of_their_moments(power: float) -> None:
    random = np.random.default_rng(0)
    keys = random.standard_normal((2, 90, 16)) @ random.standard_normal((16, 16)) * np.array([1, 100])[:, None, None]
    moments = np.swapaxes(keys, 1, 2) @ keys / 90
    matrices = whitening(moments, power, damping=1e-12)
    np.testing.assert_allclose(matrices, np.swapaxes(matrices, 1, 2), rtol=0, atol=1e-12)
    new_keys = keys @ matrices
    new_moments = np.swapaxes(new_keys, 1, 2) @ new_keys / 90
    before, after = (np.linalg.eigvalsh(x) for x in (moments, new_moments))
    # C^(1 - power) up to a factor; the damping is 1e-12 of the mean, the least eigenvalue over 1e-6 of it
    ratios = after / before ** (1 - power)
    np.testing.assert_allclose(ratios, np.broadcast_to(ratios[:, :1], ratios.shape), rtol=1e-6)
    np.testing.assert_allclose(before.sum(-1), after.sum(-1), rtol=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_scores_of_keys_that_vary_most_in_one_direction_err_less(seed: int) -> None:
    random = np.random.default_rng(seed)
    turns = [np.linalg.qr(random.standard_normal((32, 32)))[0] for _ in range(2)]
    # 30 times as much in one direction as in all others, and along no channel
    keys = random.standard_normal((1, 4, 64, 32)) @ (turns[0] * np.array([30.0] + [1.0] * 31)[:, None]) @ turns[1]
    queries, errors = random.standard_normal((200, 32)), []
    rows = keys.reshape(-1, 32)
    for matrices in (np.eye(32)[np.newaxis], whitening((rows.T @ rows / len(rows))[np.newaxis])):
        new_queries, new_keys = queries @ np.linalg.inv(matrices[0]), (keys @ matrices).astype(np.float32)
        feedback = key_feedback((new_queries.T @ new_queries / len(queries))[np.newaxis]).astype(np.float32)
        codes, low, step = round_with_feedback(new_keys, feedback, 3, 0.9)
        decoded_keys = low[..., np.newaxis, :].astype(np.float64) + step[..., np.newaxis, :].astype(np.float64) * codes
        errors.append(np.sqrt((((decoded_keys - new_keys) @ new_queries.T) ** 2).mean()))
    # 0.35 to 0.43 in five draws
    assert errors[1] < 0.5 * errors[0]


def test_keys_that_are_all_zero_stay_and_others_have_to_be_finite() -> None:
    np.testing.assert_allclose(whitening(np.zeros((1, 4, 4))), np.eye(4)[np.newaxis], rtol=0, atol=1e-12)
    with pytest.raises(InputError, match="NaN or infinite, the first at input 2"):
        whitening(np.diag([1, 1, np.nan, 1])[np.newaxis])
