"""``ai.graphopt::PagedAttention``, version 1: attention of many requests, whose tokens stand one behind the other.

B requests, T new tokens of all of them, Hq query heads, Hk KV heads, G = Hq / Hk (query head h reads KV head h div G),
D head size (a multiple of 16, up to 512, or to 1280 with a ``value_size``; for codes up to 256, of 32 for int4, of 64
for int6), N blocks of P tokens each (16, 32, 64 or 128), C columns of the block table.

Inputs, all but the last two required:
    query: float or float16 [..., Hq D]; the leading dimensions together are the T tokens.
    key, value: the type of query, [..., Hk D], the same tokens; value is [0] with a ``value_size``.
    starts: int32 [B + 1]: the new tokens of request b are starts[b] .. starts[b + 1] - 1. starts[0] = 0, starts[B] = T.
    past: int32 [B], tokens that a request has stored. Its new tokens have positions past .. past + new - 1.
    block_table: int32 [B, C]: the token at position p of request b lies in block block_table[b, p div P], at p mod P.
        Entries behind those that a request needs are not looked at; -1 is usual.
    sink_logits: float [Hq] or [0], logits without a value that take part in the softmax (gpt-oss).
    keys, values: float, float16, bfloat16 or uint8 [N, P, Hk, W], the blocks. W = D, but D / 2 for int4
        and 3 D / 4 for int6. What lies where within a block says :mod:`.layout`, and not this shape: heads one
        behind the other, keys [P/16, W, 16]. With a ``value_size`` W = D / 2, and both hold half of a block's tokens.
    key_scales, value_scales: float [N, P, Hk], of blocks of integers; [0] for floats.
    feedback: float16 [Hk, D, D], of nodes with ``key_feedback``; [0] of those with ``chooses``, and others lack it.
    choice: int32 [..., K], of nodes with ``chooses``, which alone have it: the positions that a token reads, rising and
        at most its own, and -1 behind them. The leading dimensions are those of query.

Attributes:
    kv_heads: int, Hk.
    scale: float, of q . k.
    softcap: float, c in c tanh(s / c), after ``scale``; 0 for none.
    window: int: position p sees positions > p - window; 0 for none.
    chunks: int, 0 or 1; absent: 0. With 1 position p sees positions >= p - p mod window: its chunk (Llama 4).
    storage: string: float32, float16, bfloat16, int8, int6 or int4.
    value_size: int, optional, V: values are the first V numbers of keys, a multiple of 16, and are not stored; where it
        is 0 or absent they are. With it query heads read one row of a token, a latent (DeepSeek-V2, section 2.1.2),
        which is stored as floats, in blocks of 32 tokens or more.
    key_feedback: int, 0 or 1, of blocks of integers; absent: 0. With 1 the channels of a new key are rounded one after
        the other, and what one is rounded by changes those behind it by ``feedback``, as in ``KVAttention``.
    chooses: int, 0 or 1, of latents without a window; absent: 0. With 1 a token reads what ``choice`` says and no other
        (DeepSeek-V3.2, DeepSeek-AI 2025, section 2.1).
    residuals: int, 0 or 1, of blocks of integers; absent: 0. With 1 the newest tokens of a block that is not full have
        second codes, of what the first ones leave, in its free slots (in two stages, as Juang & Gray 1982): see
        :mod:`.layout`. A query at position p reads the tokens of its own block, P floor(p / P) on, by
        the sum of both where a block with p mod P + 1 tokens keeps both, and all others by the first codes: whatever
        calls they came in.
    slopes: floats [Hq], optional: a query of head h at position p that reads the token at j adds slopes[h] (j - p) to
        its score (ALiBi, Press et al. 2022). With them softcap is 0.

Outputs:
    y: the type and the shape of query; [..., Hq V] with a ``value_size``.
    new_keys, new_values, new_key_scales, new_value_scales: the blocks after the call. A kernel may write them where
        the inputs lie.

The new tokens of all requests are stored first, rounded to the storage; then each query at position p reads the
positions <= p (> p - window) of its request, or those that it chooses: y = softmax(scale q . k, softcapped, plus slope
(j - p), and the sink logit) V. A key that is read and not finite makes y NaN, a value that is read its channel; of
integers all its channels. Requests may share blocks that they read (a common prefix), but a block with a new token
belongs to one request.

It is an error if D or P is another size; if `starts` does not begin with 0, falls, or does not end with T; if a number
of tokens is negative; if a request needs more than C P tokens; if a block that it needs is not one of the N; if a block
is to get new tokens of two requests, or stands twice where one request writes; if a token chooses no position, or the
positions that it chooses do not rise, or one is not from 0 to its own.

This is the PagedAttention of vLLM (Kwon et al. 2023) as onnxruntime-genai's Engine hands it to a graph.
"""

from __future__ import annotations

from graphopt.runtime_ops.operator import Operator
from graphopt.runtime_ops.paged_attention.spec.body import function, overload
from graphopt.runtime_ops.paged_attention.spec.reference import reference
from graphopt.runtime_ops.paged_attention.spec.schema import SCHEMA

PAGED_ATTENTION = Operator(SCHEMA, function, reference, overload)
