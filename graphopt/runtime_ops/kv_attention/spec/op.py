"""``ai.graphopt::KVAttention``, version 1: attention that owns its cache, in pages, of which a policy reads some.

B rows (sequences), S columns of a call, Hq query heads, Hk KV heads, G = Hq / Hk (query head h reads KV head h div G),
D head size (a multiple of 16, up to 256; to 512 where pages hold floats and have no summaries, and no policy chooses
them; to 1024 with a ``value_size``), T tokens of a page, P pages of capacity.

Inputs, all but the last required; unused ones have no elements:
    query: float or float16 [B, S, Hq D].
    key, value: the type of query, [B, S, Hk D]; value is [0] with a ``value_size``.
    past: int64 [B], tokens that a row has stored.
    new: int64 [B], tokens of a row in this call, its last columns. They have positions past .. past + new - 1.
    sink_logits: float [Hq] or [0], logits without a value that take part in the softmax (gpt-oss).
    sink_query: the type of query, [B, S, Hq D] or [0], the query for positions below ``sinks`` (LM-Infinite, Han et al.
        2024, caps the distance to them: another rotary angle); else ``query`` reads them.
    keys, values: [B, Hk, P, n], float, float16, bfloat16, float8e4m3fn or uint8, the pages, see :mod:`.layout`.
    scales: float16 [B, Hk, P, 2 D + 2 T], of a page: key low [D], key step [D], value low [T], value step [T];
        and T more with ``token_factors``, factors of keys [T].
    recent: float [B, Hk, R, 2 T D], R = sink_pages + recent_pages + 1 slots: keys [T, D], then values [T, D].
    summaries: float [B, Hk, P, Z], Z = 2 D (min and max of the keys of a page) or D (their mean), 0 where no head
        retrieves, and 2 D more with ``compensate``.
    feedback: float16 [Hk, D, D], of nodes with ``key_feedback``, which alone have it.
    Storages of floats use no scales and no `recent`; without retrieval and ``compensate`` there are no summaries. What
    is not used is any tensor of rank 4 without elements.

Attributes:
    kv_heads: int, Hk.
    scale: float, of q . k.
    softcap: float, c in c tanh(s / c), after ``scale``; 0 for none.
    window: int, the model's own: position p sees positions > p - window; 0 for none.
    chunks: int, 0 or 1; absent: 0. With 1 position p sees positions >= p - p mod window: its chunk (Llama 4).
    page: int, T: 16, 32, 64 or 128.
    storage: string, float32, float16, bfloat16, float8 (E4M3FN, Micikevicius et al. 2022), int8, int6, int4,
        int3, int2 or int1.
    sink_pages, recent_pages: int, full pages that a storage of integers keeps as floats, besides the newest.
    policies: ints, one or Hk: 0 dense, 1 streaming, 2 retrieval, 3 sparse prefill.
    sinks, recent: int, tokens that streaming and retrieval always read, the first and the last.
    budget: int, pages that retrieval reads besides, at most; 0 with a ``mass`` sets no limit.
    summary: string, bounds or mean: what retrieval knows of a page.
    mass: float, 0 to 1, the share of the softmax of the scores that the pages together need; 0 where ``budget`` alone
        counts, and at 1 all candidates are needed.
    channels: int, of the queries, by which scores are made; 0 for all D.
    compensate: int, 0 or 1: heads that stream read one token more, for those that they dropped. With a ``window`` it
        must be 0.
    prefill_mass, query_block, query_stride: float from 0 to 1, and ints up to 1024, of heads of policy 3, which alone
        state them; query_block is a multiple of query_stride. CPUs only.
    clip: float, above 0 and at most 1, of storages of integers: codes span this share of what the numbers of a set
        span, its middle, and numbers beyond it get the first or the last code. Nodes may leave it out, for 1.
    value_clip: float, optional, the same of values, where it is another share than that of keys. CPUs only.
    token_factors: int, 0 or 1, of storages of integers: the keys of a page are divided by a factor per token before
        they are rounded, and are what codes mean times it; see :func:`.layout.factors_of_tokens`. Nodes may leave it
        out, for 0. CPUs only.
    key_feedback: int, 0 or 1, of storages of integers: the channels of a page of keys are rounded one after the other,
        and what one is rounded by changes those behind it by ``feedback``; see :func:`.layout.round_with_feedback`.
        Nodes may leave it out, for 0. CPUs only.
    slopes: floats [Hq], optional: a query of head h at position p that reads the token at j adds slopes[h] (j - p) to
        its score (ALiBi, Press et al. 2022). With them softcap is 0, policies are dense or streaming, and compensate is
        0. CPUs only.
    value_size: int, optional, V: values are the first V numbers of keys, a multiple of 16, and are not stored; where it
        is 0 or absent they have pages of their own. With it query heads read one row of a token, a latent (DeepSeek-V2,
        DeepSeek-AI 2024); y is [B, S, Hq V], `values` has no elements, `scales` 2 D numbers of a page, and T with
        ``token_factors``, `recent` T D of a slot. Policies are dense or streaming, without ``compensate``. GPUs have
        no kernels for it.
    value_storage: string, optional, of values, where they and keys are codes of different bits; where it is "" or
        absent they are stored as keys are. Not with a ``value_size``. CPUs only.
    The kernel takes nodes without ``mass``, ``channels`` and ``compensate``, as 0.

Outputs:
    y: the type of query, [B, S, Hq D]; 0 in columns that are no tokens.
    keys, values, scales, recent, summaries after the call, in the shapes and types of the inputs.

The new tokens are appended first, then each query at position p reads, of the positions <= p (> p - window)::

    dense      all
    streaming  those < sinks or > p - recent                        (StreamingLLM, Xiao et al. 2024)
    retrieval  these, and all in the ``budget`` pages of the highest score; of equal scores in the lower page. Pages
               with a visible token beyond those are candidates. A score is the largest, among the G query heads, of
               sum max(q min, q max)   (bounds: Quest, Tang et al. 2024; LServe, Yang et al. 2025)
               sum q mean              (mean: TriForce, Sun et al. 2024)
               where NaN counts as infinite
    sparse prefill  all, but queries in a whole block of the call leave pages out together

``channels`` uses the channels with the largest sums of |q| over the G heads, of equal sums the lower, NaN counts as
infinite (SparQ, Ribar et al. 2024). ``mass`` takes pages in that order until they have the share, each with a weight of
exp(scale (score - the highest score of a candidate)), in float32 (top-p: Twilight, Lin et al. 2025). Pages of the
highest score weigh 1, also where that is infinite.

**Sparse prefill.** A block is the positions n ``query_block`` up to (n + 1) ``query_block``, whole where all of them
are new in this call. Its queries at positions p with p mod ``query_stride`` = ``query_stride`` - 1 are asked (sampled
queries: SampleAttention, Zhu et al. 2024). The weight W of a page is the sum of their dense softmax weights, sink
logit and all, over the G heads and over the tokens of the page that are neither < sinks nor > p - recent. Pages are
left out from the lowest W on, of equal ones the later first, as long as their W together are less than (1 -
``prefill_mass``) times the queries that are asked and their heads; none where one of these queries or of the keys
that they see is not finite. Each query of the block reads what streaming would, and all that it sees in the pages
that are not left out.

``compensate`` (RazorAttention, Tang et al. 2024): the last 2 D numbers of a page's summary are the mean key and the
mean value of all tokens at positions >= ``sinks``, up to and including the newest of the page: m += (x - m) / count,
float32, from the numbers before any rounding; the first token of a page goes on from the page before. A query at
position p of a head that streams reads, besides, the mean as it was before page (p - recent + 1) div T, if N > 0 tokens
are in it: with the score softcapped(scale q . mean key) + log N, ``query`` being q. It stands for the tokens that were
dropped, but for those in front of the newest in the page where these begin.

A policy per head follows RazorAttention (Tang et al. 2024). y = softmax(scale q . k, softcapped, plus slope (j - p),
and the sink logit) V; a query that reads nothing has y = 0. A key that is read and not finite makes y NaN, a value that
is read its channel.

Page l = position div T lies in physical page l, until a cache whose heads all stream is full: its pages behind the F =
ceil(sinks / T) first are then a ring, F + (l - F) mod (P - F), if (P - F) T >= max(recent, window) + S + T, or 2 T
with ``compensate``. Other caches must hold all tokens. Under a storage of integers page l begins in `recent`, in slot
l < sink_pages ? l : sink_pages + (l - sink_pages) mod (recent_pages + 1), and is rounded to codes when the page begins
that takes its slot.
"""

from __future__ import annotations

from graphopt.runtime_ops.kv_attention.spec.body import function, overload
from graphopt.runtime_ops.kv_attention.spec.policies import POLICIES
from graphopt.runtime_ops.kv_attention.spec.reference import reference
from graphopt.runtime_ops.kv_attention.spec.schema import SCHEMA
from graphopt.runtime_ops.kv_attention.spec.storages import STORAGE_OF
from graphopt.runtime_ops.operator import Operator

KV_ATTENTION = Operator(
    SCHEMA,
    function,
    reference,
    overload,
    without_kernel=(
        *(f"{name}=1" for name, policy in POLICIES.items() if not policy.has_kernel),
        # also as the end of value_storage=name
        *(f"storage={name}" for name, storage in STORAGE_OF.items() if not storage.has_kernel),
    ),
)
