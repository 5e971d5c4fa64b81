"""The functions that models with recurrent states call by name become nodes of ours while a model is traced.

    torch_chunk_gated_delta_rule, chunk_kimi_delta_attention,
    mamba2_chunk_scan, mamba_selective_scan                    ->  ai.graphopt::LinearRecurrence
    update_conv_state, causal_conv1d_fn                        ->  ai.graphopt::CausalConv

transformers spells these functions out chunk by chunk or token by token, for the number of tokens that is traced. As
one node each they take any number of tokens, and one graph serves prefill, chunks and single steps.

States are what the operators hold: a convolution of L taps keeps L - 1 tokens and not L, and a recurrent state is
[batch, heads, K, V]. Padding is left to the mask of the operators, so that it touches no state wherever it stands.

Where a model convolves by itself, as with taps that it computes for each token, it gets the last tokens in front of
the new ones, as from transformers' own cache. Padding is zeros there, as in transformers: in front of a text it says
nothing.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from typing import TYPE_CHECKING, Any

from graphopt.errors import InputError
from graphopt.models import experts, griffin, lightning, openai_gpt, rwkv, selective_scan, substitutes, xlstm
from graphopt.models.recurrent_calls import Calls, convolve, keep_tail, mask_new_tokens, recur, step_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import onnx_ir as ir

_L2_EPSILON = 1e-6


@contextlib.contextmanager
def recurrences_as_nodes() -> Iterator[Calls]:
    """Let models of transformers call our operators, and keep states as these do, for as long as the block runs.

    The operators compute zeros in torch: a model is run to find its shapes, or to be traced.

    Yields:
        What is known of the calls; of a model that was run also which tails no known function convolved.
    """
    caches = importlib.import_module("transformers.cache_utils")
    calls = Calls()
    replacements: dict[Any, dict[str, Any]] = {
        caches.LinearAttentionLayer: {"update_recurrent_state": _update_recurrent_state},
        # else `generate` makes a mask of attention where no layer attends
        caches.LinearAttentionCacheLayerMixin: {"is_compileable": False},
        caches.Cache: {
            "update_conv_state": functools.partialmethod(_update_conv_state, calls),
            "get_recurrent_state": _recording(calls, caches.Cache.get_recurrent_state),
        },
    }
    functions = {name: functools.partial(function, calls) for name, function in _FUNCTIONS.items()}
    for name, module in list(sys.modules.items()):
        if name.startswith("transformers.models.") and ".modeling_" in name:
            replacements[module] = {key: value for key, value in functions.items() if key in vars(module)}
            for (name_of_owner, method), wrap in _METHODS.items():
                owner = module if name.endswith(f".{name_of_owner}") else vars(module).get(name_of_owner)
                if owner is not None:
                    replacements.setdefault(owner, {})[method] = wrap(calls, getattr(owner, method))
    with contextlib.ExitStack() as stack:
        for owner, members in replacements.items():
            for name, member in members.items():
                stack.callback(setattr, owner, name, vars(owner)[name])
                setattr(owner, name, member)
        yield calls


def confirm_convolved(calls: Calls) -> None:
    """Refuse a model whose trace keeps the tail of a convolution that neither a known function nor the model reads.

    Raises:
        InputError: there is such a tail.
    """
    if calls.inputs:
        _, layer, _, _ = next(iter(calls.inputs.values()))
        raise InputError(
            "the model keeps the tail of a convolution, and no known function convolves it",
            tensor=type(layer).__name__,
            remedy=f"known are {', '.join(_FUNCTIONS)}",
        )


def simplify(graph: ir.Graph) -> None:
    """Drop transposes of axes that come back at once: around convolutions tokens are the last axis in transformers."""
    for node in list(graph):
        inner = node.inputs[0].producer() if node.op_type == "Transpose" and node.inputs[0] is not None else None
        if inner is None or inner.op_type != "Transpose" or inner.inputs[0] is None:
            continue
        first, second = (list(step.attributes.get_ints("perm", ())) for step in (inner, node))
        if [first[axis] for axis in second] == list(range(len(first))) and not node.outputs[0].is_graph_output():
            node.outputs[0].replace_all_uses_with(inner.inputs[0])
            graph.remove(node, safe=True)
            if not inner.outputs[0].uses() and not inner.outputs[0].is_graph_output():
                graph.remove(inner, safe=True)


# In place of methods of caches.


def _update_conv_state(
    cache: Any,
    calls: Calls,
    conv_states: Any,
    layer_idx: int,
    state_idx: int = 0,
    conv_kernel_size: int | None = None,
    **_: Any,
) -> Any:
    """Remember whose state belongs to [batch, channels, tokens], which a convolution reads next, and return these.

    Of a tail that the model convolves itself, return the tokens before the new ones too, and keep the last.
    """
    layer = cache.layers[layer_idx]
    if (layer_idx, state_idx) not in calls.tails:
        calls.inputs[id(conv_states)] = (conv_states, layer, layer_idx, state_idx)
        return conv_states
    torch = importlib.import_module("torch")
    taps = conv_kernel_size or conv_states.shape[-1]
    state = layer.conv_states[state_idx] if layer.has_previous_state[state_idx] else None
    if state is None:
        state = conv_states.new_zeros((*conv_states.shape[:2], taps))
    torch._check(state.shape[0] == conv_states.shape[0])
    tokens = torch.cat([state, conv_states], dim=-1)
    keep_tail(layer, state_idx, tokens[..., -taps:])
    return tokens


def _update_recurrent_state(layer: Any, recurrent_states: Any, state_idx: int = 0, **_: Any) -> Any:
    """Store a state [batch, heads, K, V]."""
    layer.recurrent_states[state_idx] = recurrent_states
    layer.is_recurrent_states_initialized[state_idx] = True
    layer.has_previous_state[state_idx] = True
    return recurrent_states


def _recording(calls: Calls, get_recurrent_state: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method of a cache that also tells ``calls`` what it returned: not every function is given it."""

    def get(*args: Any, **kwargs: Any) -> Any:
        calls.recurrent_state = get_recurrent_state(*args, **kwargs)
        return calls.recurrent_state

    return get


# In place of functions of models, with the arguments that these have.


def _apply_mask_to_padding_states(calls: Calls, hidden_states: Any, attention_mask: Any) -> Any:
    """Leave padding to the operators, if these are all that convolves."""
    mask_new_tokens(calls, hidden_states, attention_mask)
    if calls.mask is None or not calls.tails:
        return hidden_states
    return hidden_states * calls.mask[:, :, None].to(hidden_states.dtype)


def _causal_conv1d_fn(
    calls: Calls, hidden_states: Any, weight: Any, bias: Any = None, activation: str | None = None, **_: Any
) -> Any:
    layer, number = calls.inputs.pop(id(hidden_states), (None, None, 0, 0))[1::2]
    state = layer.conv_states[number] if layer is not None and layer.has_previous_state[number] else None
    if state is None:
        state = hidden_states.new_zeros((*hidden_states.shape[:2], weight.shape[-1] - 1))
    y, new_state = convolve(calls, hidden_states, state, weight, bias, activation)
    if layer is not None:
        keep_tail(layer, number, new_state)
    return y


def _causal_conv1d_update(
    calls: Calls, hidden_states: Any, conv_state: Any, weight: Any, bias: Any = None, activation: str | None = None
) -> Any:
    y, new_state = convolve(calls, hidden_states, conv_state, weight, bias, activation)
    conv_state.copy_(new_state)
    return y


def _gated_delta_rule(  # noqa: PLR0913, the arguments are those of transformers
    calls: Calls,
    query: Any,
    key: Any,
    value: Any,
    g: Any,
    beta: Any,
    chunk_size: int = 64,
    initial_state: Any = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Any, Any]:
    """Gated delta rule, with a decay ``g`` per head [batch, tokens, heads] or per channel [..., K]."""
    del chunk_size
    if use_qk_l2norm_in_kernel:
        query, key = _l2_norm(query), _l2_norm(key)
    decay = g if g.dim() == 4 else g[..., None]
    operands = [query, key, value, decay, beta[..., None]]
    output, state = recur(calls, operands, initial_state, delta=True, scale=query.shape[-1] ** -0.5)
    return output, state if output_final_state else None


def _l2_norm(x: Any) -> Any:
    """Return x / sqrt(sum x^2 + eps), as an RMS norm: x K^(-1/2) / sqrt(mean x^2 + eps / K)."""
    torch = importlib.import_module("torch")
    size = x.shape[-1]
    gain = torch.full((size,), size**-0.5, dtype=torch.float32)
    return torch.nn.functional.rms_norm(x.float(), (size,), gain, _L2_EPSILON / size)


def _mamba2_chunk_scan(  # noqa: PLR0913, the arguments are those of transformers
    calls: Calls,
    hidden_states: Any,
    dt: Any,
    A: Any,
    B: Any,
    C: Any,
    chunk_size: int,
    D: Any = None,
    dt_bias: Any = None,
    initial_states: Any = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **_: Any,
) -> Any:
    """SSD of Mamba2: values [batch, tokens, heads, P], steps dt [batch, tokens, heads], B and C [..., groups, N]."""
    del chunk_size
    dt = step_size(dt, dt_bias, dt_softplus)
    if tuple(dt_limit) != (0.0, float("inf")):
        dt = dt.clamp(*dt_limit)
    operands = [C, B, hidden_states, (dt * A)[..., None], dt[..., None]]
    output, state = recur(calls, operands, initial_states, delta=False, scale=1.0)
    if D is not None:
        output = output + D[..., None] * hidden_states
    return (output, state) if return_final_states else output


def _state_update(calls: Calls, state: Any, hidden_states: Any, *_: Any, **__: Any) -> Any:
    """Stand in for a step of one token, which is run to find the inputs of a trace, and not traced."""
    del calls, state
    return hidden_states.clone()


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "apply_mask_to_padding_states": _apply_mask_to_padding_states,
    "causal_conv1d_fn": _causal_conv1d_fn,
    "causal_conv1d_update": _causal_conv1d_update,
    "torch_chunk_gated_delta_rule": _gated_delta_rule,
    "torch_recurrent_gated_delta_rule": _gated_delta_rule,
    "chunk_kimi_delta_attention": _gated_delta_rule,
    "recurrent_kimi_delta_attention": _gated_delta_rule,
    "mamba2_chunk_scan": _mamba2_chunk_scan,
    "mamba2_selective_state_update": _state_update,
    "mamba_selective_scan": selective_scan.mamba_selective_scan,
    "mamba_selective_state_update": _state_update,
}

_INDEXERS = (
    "AXK2Indexer",
    "DeepseekV32Indexer",
    "Dots3NoteTextIndexer",
    "GlmMoeDsaIndexer",
    "HYV4Indexer",
)

_METHODS: dict[tuple[str, str], Callable[[Calls, Callable[..., Any]], Callable[..., Any]]] = {
    ("RecurrentGemmaForCausalLM", "forward"): griffin.with_cache,
    ("RecurrentGemmaRecurrentBlock", "forward"): griffin.with_cached_states,
    ("RwkvForCausalLM", "forward"): rwkv.with_cache,
    ("xLSTMForCausalLM", "forward"): xlstm.with_cache,
    ("MiniMaxForCausalLM", "forward"): lightning.with_cache,
    ("modeling_minimax", "MiniMaxCache"): lightning.plain_cache,
    ("MiniMaxLightningAttention", "forward"): lightning.with_cached_state,
    ("ZambaMambaMixer", "forward"): selective_scan.in_one_scan,
    ("OpenAIGPTLMHeadModel", "forward"): openai_gpt.with_cache,
    ("DbrxExperts", "forward"): experts.gated_by_matrices,
    ("LongcatFlashExperts", "forward"): experts.with_identities,
    ("JetMoeTopKGating", "forward"): experts.counts_of_experts,
    ("JetMoeParallelExperts", "forward"): experts.product_of_counts,
    ("FalconAttention", "forward"): substitutes.grouped_queries,
    ("Gemma3nTextMLP", "_gaussian_topk"): substitutes.gaussian_top,
    **{(indexer, "forward"): substitutes.minimum_as_node for indexer in _INDEXERS},
    ("Llama4TextRotaryEmbedding", "forward"): substitutes.angles,
    ("modeling_llama4", "apply_rotary_emb"): substitutes.rotate_pairs,
    ("Llama4TextDecoderLayer", "forward"): substitutes.tempered_by_positions,
}
"""Methods that keep states in attributes, or that cannot be written: what stands in their place, made of themselves."""
