"""The selective scan of Mamba while it is traced: one recurrence in which each channel is a head with one value.

    h_t = exp(dt_t A) h_(t-1) + dt_t B_t x_t,   y_t = C_t h_t + D x_t        ->   LinearRecurrence (V = 1)

Gu and Dao 2023 (Mamba), algorithm 2. All channels have the same B and C. In Zamba channels lie in groups, which its
model calls heads, with B and C of their own, as heads of queries share heads of keys in the operator; transformers
scans one group after the other, each with a slice of the state.
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

from graphopt.models.recurrent_calls import Calls, convolve, keep_tail, mask_new_tokens, recur, step_size

if TYPE_CHECKING:
    from collections.abc import Callable


def mamba_selective_scan(  # noqa: PLR0913, the arguments are those of transformers
    calls: Calls,
    hidden_states: Any,
    dt: Any,
    A: Any,
    B: Any,
    C: Any,
    D: Any = None,
    z: Any = None,
    delta_bias: Any = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **_: Any,
) -> Any:
    """Stand in for the function of models whose channels are one group.

    Values and steps are [batch, channels, tokens], A [channels, N], B and C [batch, N, tokens].
    """
    dt = step_size(dt.transpose(1, 2), delta_bias, delta_softplus)
    B, C = (part.transpose(1, 2)[:, :, None] for part in (B, C))
    output, state = _scan(calls, hidden_states.transpose(1, 2), dt, A, B, C, D, calls.recurrent_state)
    output = output.transpose(1, 2)
    if z is not None:
        output = output * importlib.import_module("torch").nn.functional.silu(z)
    return (output, state) if return_last_state else output


def in_one_scan(calls: Calls, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``ZambaMambaMixer.forward``, whose groups of channels are scanned by one node.

    Args:
        calls: of this run.
        original: that of transformers.
    """

    @functools.wraps(original)
    def forward(self: Any, hidden_states: Any, cache_params: Any, attention_mask: Any = None, **_: Any) -> Any:
        torch = importlib.import_module("torch")
        layer = cache_params.layers[self.layer_idx]
        mask_new_tokens(calls, hidden_states, attention_mask)
        x, gate = self.in_proj(hidden_states).unflatten(2, (self.intermediate_size, 2)).unbind(3)
        tokens = x.transpose(1, 2)
        is_first = not layer.has_previous_state[0]
        tail = tokens.new_zeros((*tokens.shape[:2], self.conv_kernel_size - 1)) if is_first else layer.conv_states[0]
        taps, bias = self.conv1d.weight.squeeze(1), self.conv1d.bias
        tokens, tail = convolve(calls, tokens, tail, taps, bias, self.activation)
        keep_tail(layer, 0, tail)
        x = tokens.transpose(1, 2)
        by_group = x.unflatten(2, (self.n_mamba_heads, self.mamba_head_dim)).transpose(1, 2)
        sizes = [self.time_step_rank, self.ssm_state_size, self.ssm_state_size]
        low_rank, B, C = (by_group @ self.x_proj_weight.transpose(1, 2)).transpose(1, 2).split(sizes, dim=3)
        dt = (low_rank.transpose(1, 2) @ self.dt_proj_weight.transpose(1, 2)).transpose(1, 2).flatten(2)
        dt = step_size(dt, None if self.dt_proj_bias is None else self.dt_proj_bias.flatten(), softplus=True)
        A = -torch.exp(self.A_log.float().flatten(0, 1))
        y, state = _scan(calls, x, dt, A, B, C, self.D.flatten(), cache_params.get_recurrent_state(self.layer_idx))
        cache_params.update_recurrent_state(state, self.layer_idx)
        return self.out_proj(y * torch.nn.functional.silu(gate))

    return forward


def _scan(calls: Calls, x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any, state: Any) -> tuple[Any, Any]:
    """Return outputs [batch, tokens, channels] and the state [batch, channels, N, 1].

    Values and steps are [batch, tokens, channels], A [channels, N], B and C [batch, tokens, groups, N], D [channels].
    """
    operands = [C, B, x[..., None], dt[..., None] * A, dt[..., None]]
    output, state = recur(calls, operands, state, delta=False, scale=1.0)
    return (output[..., 0] if D is None else output[..., 0] + x * D), state
