"""Attention owns its cache, in pages that are allocated once and filled in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from graphopt.analysis.structure.paged_caches import has_growing_caches
from graphopt.graph.diagnostics import Effect
from graphopt.passes.base import Pass

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphopt.passes.context import Context
    from graphopt.passes.recipe import Recipe
from graphopt.passes.common.paging.paged_attention import Page, page_attention


class PageKV(Pass):
    """Let attention own its cache, in pages of a fixed number of tokens that are allocated once and filled in place.

    before::

        m = <arithmetic on attention_mask>                                       causal, not padding, perhaps a window
        y, present_k, present_v = Attention(q, k, v, m, past_k, past_v)          caches [batch, KV heads, past, size]
        o = Reshape(Transpose(y))

    after::

        o, keys, values, ... = ai.graphopt::KVAttention(q', k', v', past_length, new_length, ..., keys, values, ...)

    q', k', v' are [batch, length, heads x size]: the Transpose and Reshape around q, k and v go. Query i of the n new
    tokens of a row with p stored ones stands at position p + i, and sees j where j <= p + i and, with a window w,
    j > p + i - w: what m says with columns for positions, since padding stands on the left and both then differ by one
    number per row. Padding is not stored. A cache that grows is copied at each step; this one is written where it lies,
    and pages are what a policy can pick (PagedAttention, Kwon et al. 2023; Quest, Tang et al. 2024). The pages of a
    layer with a window are reused in turn: j > p + i - w is the policy "streaming" without sinks, and older tokens are
    never read. A window of chunks (Llama 4) shows a query the tokens of its own chunk of w, from
    (p + i) - (p + i) mod w on: the attribute ``chunks``.

    A latent that one row of the cache holds (``absorb_latent``) is stored once: values are the first numbers of keys,
    and KVAttention has a ``value_size``.

    A layer that reads the keys and values of another one (Gemma 3n and 4) stores the same in pages of its own::

        Attention(q2, present_k, present_v, m)      ->      KVAttention(q2', k', v', ..., keys2, values2, ...)

    So does what reads a cache token by token through some of its heads, or through heads that are repeated
    (differential attention)::

        v = Concat(past_v, new);  Attention(q, k, Tile(Split(v)[0]), m)
          ->  KVAttention(q', k', Tile(Split(new)[0])', ..., keys2, values2, ...)

    A mask may add slope (j - p) to the score of the key at j, for the query at p: biases by distance (ALiBi, Press et
    al. 2022), found by running the mask, become the attribute ``slopes``. GPUs have no kernel for them.

    Heads whose size is no multiple of 16 get zeros behind their queries, keys and values, which change no score, and
    the output is cut.

    The input ``attention_mask`` and what made masks of it disappear; ``past_length`` and ``new_length`` int64 [batch]
    come instead. A graph has one kind of cache: if one layer cannot be rewritten none is, and each says why.
    """

    name: ClassVar[str] = "page_kv"
    effect: ClassVar[Effect] = "exact"

    page: Page = 64

    @property
    def context_tokens(self) -> int:
        """See :class:`Pass`: more than one page."""
        return self.page

    @classmethod
    def is_needed(cls, graph: ir.Graph, recipe: Recipe) -> bool:
        """Return whether caches grow, and the recipe writes them in place and has no other step for caches."""
        lower = recipe.options_of("lower")
        is_paged = lower.get("target") in ("ort-cpu", "ort-cuda") and lower.get("caches") == "pages"
        return is_paged and "cache" not in recipe.phases and has_growing_caches(graph)

    def rewrite(self, model: ir.Model, context: Context) -> None:
        """Rewrite all attention of the graph, or none."""
        page_attention(model, context, self.page)
