"""``ai.graphopt::PagedAttention``, version 1: attention of many requests, whose tokens stand one behind the other.

B requests, T new tokens of all of them, Hq query heads, Hk KV heads, G = Hq / Hk (query head h reads KV head h div G),
D head size (a multiple of 16, up to 256), N blocks of P tokens each, C columns of the block table.

Inputs, all required:
    query: float or float16 [..., Hq D]; the leading dimensions together are the T tokens.
    key, value: the type of query, [..., Hk D], the same tokens.
    starts: int32 [B + 1]: the new tokens of request b are starts[b] .. starts[b + 1] - 1. starts[0] = 0, starts[B] = T.
    past: int32 [B], tokens that a request has stored. Its new tokens have positions past .. past + new - 1.
    block_table: int32 [B, C]: the token at position p of request b lies in block block_table[b, p div P], at p mod P.
        Entries behind those that a request needs are not looked at; -1 is usual.
    sink_logits: float [Hq] or [0], logits without a value that take part in the softmax (gpt-oss).
    keys, values: float, float16 or bfloat16 [N, P, Hk, D], the blocks.

Attributes:
    kv_heads: int, Hk.
    scale: float, of q . k.
    softcap: float, c in c tanh(s / c), after ``scale``; 0 for none.
    window: int: position p sees positions > p - window; 0 for none.

Outputs:
    y: the type and the shape of query.
    new_keys, new_values: the blocks after the call. A kernel may write them where `keys` and `values` lie.

The new tokens of all requests are stored first, rounded to the type of the blocks; then each query at position p reads
the positions <= p (> p - window) of its request: y = softmax(scale q . k, softcapped, and the sink logit) V. A key that
is read and not finite makes y NaN, a value that is read its channel. Requests may share blocks that they read (a common
prefix), but no two new tokens may go to the same place.

It is an error if D is another size; if `starts` does not begin with 0, falls, or does not end with T; if a number of
tokens is negative; if a request needs more than C P tokens; if a block that it needs is not one of the N; if two new
tokens have one place.

This is the layout of vLLM's PagedAttention (Kwon et al. 2023) as onnxruntime-genai's Engine hands it to a graph.
"""

from __future__ import annotations

from graphopt.runtime_ops.operator import Operator
from graphopt.runtime_ops.paged_attention.spec.body import function
from graphopt.runtime_ops.paged_attention.spec.reference import reference
from graphopt.runtime_ops.paged_attention.spec.schema import SCHEMA

PAGED_ATTENTION = Operator(SCHEMA, function, reference)
