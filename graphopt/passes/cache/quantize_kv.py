"""Caches as codes: keys with a scale per channel and page, values with one per token; the newest pages as floats."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import AfterValidator, Field

from graphopt.analysis.structure.paged_caches import describe, kv_nodes, layer_of
from graphopt.errors import InputError
from graphopt.graph.diagnostics import Effect, Rule
from graphopt.passes.base import Pass
from graphopt.passes.common.paging.paged_attention import Page, page_attention
from graphopt.passes.common.paging.states import change
from graphopt.runtime_ops.kv_attention.spec.attributes import LEVELS, PAGES, STORAGES
from graphopt.runtime_ops.kv_attention.spec.storages import STORAGE_OF

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphopt.passes.context import Context

_PAGE = 64
_CLIPS = {"int2": 0.9}
_WITH_FACTORS = ("int3", "int2")


CACHE_STORED = Rule(
    "quantize_kv.stored",
    "its cache is stored as {storage} in pages of {page}",
    factors=", {factors}",
    clip=", {clip}",
    floats=", {floats}",
)
TOKEN_FACTORS = Rule("quantize_kv.token-factors", "keys with a factor per token")
CLIP_SHARE = Rule("quantize_kv.clipped", "codes span {share} of the numbers of a set")
FLOATS = Rule("quantize_kv.floats", "{first} first and {newest} newest pages as floats")
STORED_ALREADY = Rule("quantize_kv.stored-already", "its cache is stored as {storage} already")

UNEVEN_HEADS = Rule(
    "quantize_kv.uneven-heads", "{storage} packs {unit} numbers at a time, and its heads have {head_size}"
)

_SMALLER = tuple(name for name in STORAGES if name != "float32")


def _check_storage(storage: str) -> str:
    if storage not in _SMALLER:
        raise ValueError(f"a cache is stored as {', '.join(_SMALLER)}, not {storage!r}")
    return storage


def _check_codes(storage: str | None) -> str | None:
    if storage is not None and storage not in LEVELS:
        raise ValueError(f"values that are stored in another way than keys are {', '.join(LEVELS)}, not {storage!r}")
    return storage


class QuantizeKV(Pass):
    """Store the pages of caches as float16, bfloat16, float8, or integers of 8, 6, 4, 3 or 2 bits.

    before::

        y, keys, values = KVAttention(q, k, v, ..., keys, values; storage=float32)

    after::

        y, keys, values, scales, recent = KVAttention(q, k, v, ..., keys, values, scales, recent; storage=int4)

    In a page of integers, key[t, c] = low[c] + step[c] code[t, c] and value[t, c] = low[t] + step[t] code[t, c], with
    low the least and low + L step the largest number of the set, L = 2^bits - 1: keys have channels that are large
    throughout, values do not (KIVI, Liu et al. 2024; KVQuant, Hooper et al. 2024). The error of a number is at most
    step / 2. A page is rounded once, when it leaves the window of ``recent_pages``; the first ``sink_pages`` stay
    floats.

    With ``clip`` codes span the middle of a set only: low = least + (1 - clip) / 2 span, L step = clip span. The few
    numbers beyond it get the first or the last code, and all others have a smaller step (SKVQ, Duanmu et al. 2024).
    That helps four levels, and harms more of them: a key that is cut off may be the one that a query looks for.

    With ``token_factors`` each key of a page is divided by its size before that, so that one step of a channel fits
    small and large keys: K = factor[t] (low[c] + step[c] codes[t, c]). Scores of a page are multiplied by the factors
    when it is read (after KVarN, arXiv 2606.03458, which normalizes rows and columns of keys and values).

    Pages of floats have no scales. float8 (E4M3FN, Micikevicius et al. 2022) has 4 significant bits and cuts off at
    448; what is below 2^-6 has fewer bits, so it is for caches whose numbers are neither large nor tiny.

    Standard attention is rewritten as by ``page_kv`` first. What rotates keys and values comes before this step.

    Keys ask for more bits than values: what a key errs by goes through the exponential of the softmax, what a value
    errs by is averaged over the tokens that are read. So values may have codes of their own, with ``value_storage``
    (KVTuner, Li et al. 2025, chooses such pairs per layer).

    Attributes:
        storage: float16, bfloat16, float8, int8, int6, int4, int3 or int2; of keys and values alike, or of keys where
            there is a ``value_storage``. GPUs have no kernels for int6, int3 and int2. int3 packs 32 numbers at a time:
            pages and heads are multiples of 32.
        value_storage: int8, int6, int4, int3 or int2, of values, where ``storage`` is one of these too; latents have no
            values of their own. For CPUs only.
        page: tokens of a page, which share the scales of keys; ``None`` keeps it, or is 64 without pages.
        sink_pages: first pages that integers keep as floats: their tokens get much attention (KVQuant, Xiao et al.).
        recent_pages: newest full pages that integers keep as floats, beside the one being filled (KIVI's residual).
        clip: the share of what the numbers of a set span that codes span, for integers; ``None`` is 0.9 for int2 and
            1 for the others: what lost least on a real model at 8192 tokens (docs/caches.md).
        token_factors: whether keys of integers have a factor per token; ``None``: int3 and int2 have, more bits gain
            nothing by it. For CPUs only.
    """

    name: ClassVar[str] = "quantize_kv"
    effect: ClassVar[Effect] = "lossy"
    after: ClassVar[tuple[str, ...]] = ("page_kv",)

    storage: Annotated[str, AfterValidator(_check_storage)] = "int8"
    value_storage: Annotated[str | None, AfterValidator(_check_codes)] = None
    page: Page | None = None
    sink_pages: Annotated[int, Field(ge=0, le=1 << 10)] = 1
    recent_pages: Annotated[int, Field(ge=0, le=1 << 10)] = 1
    clip: Annotated[float, Field(gt=0, le=1)] | None = None
    token_factors: bool | None = None

    @property
    def context_tokens(self) -> int:
        """See :class:`Pass`: enough that a page was rounded."""
        return (self.sink_pages + self.recent_pages + 2) * (self.page or _PAGE)

    @property
    def share_of_codes(self) -> float:
        """What codes span of what numbers span; 1 where a storage is floats."""
        return _CLIPS.get(self.storage, 1.0) if self.clip is None else self.clip

    @property
    def has_factors(self) -> bool:
        """Whether keys get a factor per token."""
        return self.storage in _WITH_FACTORS if self.token_factors is None else self.token_factors

    def rewrite(self, model: ir.Model, context: Context) -> None:
        """Change the storage of every cache; say why where there is none in pages."""
        ledger = context.ledger
        options = self
        page_attention(model, context, options.page or _PAGE)
        integer = options.storage in LEVELS
        if options.value_storage is not None and not integer:
            raise InputError(
                f"quantize_kv stores keys as {options.storage} and values as {options.value_storage}: pages of both "
                "have one type",
                remedy=f"choose storage of quantize_kv among {', '.join(LEVELS)}, or leave value_storage out",
            )
        if options.value_storage not in (None, options.storage) and context.target == "ort-cuda":
            raise InputError(
                f"quantize_kv stores keys as {options.storage} and values as {options.value_storage}, and kernels on "
                "GPUs store both alike",
                remedy="leave value_storage of quantize_kv out, or choose --target ort-cpu",
            )
        if context.target == "ort-cuda" and not STORAGE_OF[options.storage].on_gpus:
            raise InputError(
                f"quantize_kv stores caches as {options.storage}, and kernels on GPUs know no such codes",
                remedy="choose int8 or int4, or --target ort-cpu",
            )
        if not integer and options.share_of_codes < 1:
            raise InputError(
                f"clip is a share of what codes span, and {options.storage} has no codes",
                remedy="leave clip of quantize_kv out",
            )
        has_factors = options.has_factors
        if has_factors and not integer:
            raise InputError(
                f"token_factors belong to keys of integers, and {options.storage} has no scales",
                remedy="leave token_factors of quantize_kv out",
            )
        if has_factors and context.target == "ort-cuda":
            raise InputError(
                "quantize_kv gives keys a factor per token, and kernels on GPUs know none",
                remedy="leave token_factors of quantize_kv out, or choose --target ort-cpu",
            )
        for node in kv_nodes(model.graph):
            layer = layer_of(node)
            attributes, page = layer.attributes, options.page or layer.attributes.page
            if attributes.storage != "float32":
                ledger.skipped(node, STORED_ALREADY(storage=attributes.storage_name))
                continue
            # latents have no values of their own
            of_values = "" if attributes.value_size else options.value_storage or ""
            new_attributes = replace(attributes, page=PAGES[-1], storage=options.storage, value_storage=of_values)
            unit, storage_name = new_attributes.unit, new_attributes.storage_name
            if page % unit:
                raise InputError(
                    f"{storage_name} packs {unit} numbers at a time, and pages of {page} tokens are no multiple",
                    node=node.name,
                    remedy=f"set page of quantize_kv to a multiple of {unit}",
                )
            if layer.head_size % unit:
                ledger.skipped(node, UNEVEN_HEADS(storage=storage_name, unit=unit, head_size=layer.head_size))
                continue
            update = {
                "storage": options.storage,
                "value_storage": of_values,
                "page": page,
                "sink_pages": options.sink_pages if integer else 0,
                "recent_pages": options.recent_pages if integer else 0,
                "clip": options.share_of_codes,
                "token_factors": int(has_factors),
            }
            change(model.graph, node, update)
            floats = FLOATS(first=options.sink_pages, newest=options.recent_pages) if integer else None
            clip = CLIP_SHARE(share=f"{options.share_of_codes:.0%}") if options.share_of_codes < 1 else None
            factors = TOKEN_FACTORS() if has_factors else None
            fact = CACHE_STORED(storage=storage_name, page=page, factors=factors, clip=clip, floats=floats)
            ledger.changed(node, fact, [node])
        describe(model)
