"""Caches as codes: keys with a scale per channel and page, values with one per token; the newest pages as floats."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np
import onnx_ir as ir
from pydantic import AfterValidator, Field

from graphopt.analysis.structure.paged_caches import describe, kv_nodes, layer_of
from graphopt.errors import InputError, MissingTokenizerError
from graphopt.graph.diagnostics import Effect, Rule
from graphopt.graph.editing import Inserter
from graphopt.graph.weights import new_weight
from graphopt.passes.base import Pass
from graphopt.passes.common.paging.paged_attention import Page, page_attention
from graphopt.passes.common.paging.states import connect
from graphopt.quantization.rounding.ldl import key_feedback, moments_by_head, whitening
from graphopt.runtime_ops import port as input_of
from graphopt.runtime_ops import schema_of
from graphopt.runtime_ops.kv_attention.spec.attributes import LEVELS, PAGES, STORAGES, KVAttributes
from graphopt.runtime_ops.kv_attention.spec.storages import STORAGE_OF

if TYPE_CHECKING:
    from collections.abc import Collection

    import numpy.typing as npt

    from graphopt.analysis.structure.paged_caches import PagedLayer
    from graphopt.passes.context import Context
    from graphopt.quantization.statistics import InputStatistics

PAGE = 64
"""Tokens of a page, where neither the recipe nor the graph says another number."""
_CLIPS = {"int2": 0.9, "int1": 0.5}
_WITH_FACTORS = ("int3", "int2", "int1")


CACHE_STORED = Rule(
    "quantize_kv.stored",
    "its cache is stored as {storage} in pages of {page}",
    factors=", {factors}",
    feedback=", {feedback}",
    whitening=", {whitening}",
    clip=", {clip}",
    floats=", {floats}",
)
TOKEN_FACTORS = Rule("quantize_kv.token-factors", "keys with a factor per token")
FEEDBACK = Rule("quantize_kv.feedback", "keys rounded for the queries of the calibration")
WHITENING = Rule("quantize_kv.whitening", "keys of the calibration made to vary more alike in all directions")
STATISTICS = Rule(
    "quantize_kv.measured",
    "the {inputs} of {layers} layers were collected on {tokens} tokens, with the digest {text}; theirs is {digest}",
)
GPU_FEEDBACK = Rule(
    "quantize_kv.gpu-feedback", "kernels on GPUs round each channel of keys by itself: key_feedback has no effect"
)
NO_TEXT = Rule(
    "quantize_kv.no-text",
    "the model has no tokenizer, so no text says what its queries look like: each channel of keys is rounded by itself",
)
LATENT_FEEDBACK = Rule(
    "quantize_kv.latent-feedback", "its keys are values too: each channel is rounded by itself, without key_feedback"
)
CLIP_SHARE = Rule("quantize_kv.clipped", "codes span {keys} of the numbers of a set of keys, {values} of one of values")
FLOATS = Rule("quantize_kv.floats", "{first} first and {newest} newest pages as floats")
STORED_ALREADY = Rule("quantize_kv.stored-already", "its cache is stored as {storage} already")
LEFT_IN_FLOATS = Rule("quantize_kv.left-in-floats", "the recipe leaves its cache in floats")

WIDE_HEADS = Rule(
    "quantize_kv.wide-heads", "{storage} takes heads of up to {most} numbers, and its heads have {head_size}"
)
UNEVEN_HEADS = Rule(
    "quantize_kv.uneven-heads", "{storage} packs {unit} numbers at a time, and its heads have {head_size}"
)

_FLOATS = "float32"
_SMALLER = tuple(name for name in STORAGES if name != _FLOATS)


def _check_storage(storage: str) -> str:
    if storage not in _SMALLER:
        raise ValueError(f"a cache is stored as {', '.join(_SMALLER)}, not {storage!r}")
    return storage


def _check_codes(storage: str | None) -> str | None:
    if storage is not None and storage not in LEVELS:
        raise ValueError(f"values that are stored in another way than keys are {', '.join(LEVELS)}, not {storage!r}")
    return storage


def _check_layer(storage: str | tuple[str, str]) -> str | tuple[str, str]:
    if isinstance(storage, tuple):
        for name in storage:
            _check_codes(name)
    elif storage != _FLOATS:
        _check_storage(storage)
    return storage


class QuantizeKV(Pass):
    """Store the pages of caches as float16, bfloat16, float8, or integers of 8, 6, 4, 3, 2 or 1 bits.

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
    That helps two and four levels, and harms more of them: a key that is cut off may be the one that a query looks
    for. Two levels lose least where they span half: then the product of a set with what it becomes is as large as that
    with itself, so scores are neither smaller nor larger on average.

    With ``token_factors`` each key of a page is divided by its size before that, so that one step of a channel fits
    small and large keys: K = factor[t] (low[c] + step[c] codes[t, c]). Scores of a page are multiplied by the factors
    when it is read (after KVarN, arXiv 2606.03458, which normalizes rows and columns of keys and values).

    With ``key_feedback`` keys are rounded for the queries that will read them. A score q k is off by q e where the key
    is off by e, so errors along directions that queries have little of cost little: the channels of a key are rounded
    one after the other, and those behind make up for what one is off by (:func:`key_feedback`). That takes the second
    moments of queries, which the model is run for, and a matrix [D, D] of float16 for each KV head; what reads the
    pages stays as it is.

    With ``key_whitening`` keys and queries are multiplied by a matrix of each KV head first, which does not change
    their products::

        q k = (q B^-1) (B k)

    B makes the keys of the calibration vary more alike in all directions (:func:`whitening`), so that no direction
    makes the steps of all others long, as the factors that SmoothQuant (Xiao et al. 2023) and QServe (Lin et al. 2024)
    fold into channels do, in any direction.

    Pages of floats have no scales. float8 (E4M3FN, Micikevicius et al. 2022) has 4 significant bits and cuts off at
    448; what is below 2^-6 has fewer bits, so it is for caches whose numbers are neither large nor tiny.

    Standard attention is rewritten as by ``page_kv`` first. What rotates keys and values comes before this step.

    Keys ask for more bits than values: what a key errs by goes through the exponential of the softmax, what a value
    errs by is averaged over the tokens that are read. So values may have codes of their own, with ``value_storage``
    (KVTuner, Li et al. 2025, chooses such pairs per layer).

    Attributes:
        storage: float16, bfloat16, float8, int8, int6, int4, int3, int2 or int1; of keys and values alike, or of keys
            where there is a ``value_storage``. GPUs have no kernels for int6, int3, int2 and int1. int3 and int1 pack
            32 numbers at a time: pages and heads are multiples of 32. int1 is for layers that bear it: ``layers``.
        value_storage: int8, int6, int4, int3, int2 or int1, of values, where ``storage`` is one of these too; latents
            have no values of their own. For CPUs only.
        layers: by the N of a layer's ``past_key_values.N``: a storage for keys and values, or one for each, instead of
            the two above; ``float32`` leaves the layer as it is. ``graphopt search-cache`` finds them by measuring.
        page: tokens of a page, which share the scales of keys; ``None`` keeps it, or is 64 without pages.
        sink_pages: first pages that integers keep as floats: their tokens get much attention (KVQuant, Xiao et al.).
        recent_pages: newest full pages that integers keep as floats, beside the one being filled (KIVI's residual).
        clip: the share of what the numbers of a set span that codes span, for integers; ``None`` is 0.5 for int1,
            0.9 for int2 and 1 for the others: what lost least on a real model at 8192 tokens (docs/caches.md).
        token_factors: whether keys of integers have a factor per token; ``None``: int3, int2 and int1 have, more bits
            gain nothing by it. For CPUs only.
        key_feedback: whether errors of channels of keys are made up for by those behind them, for integers. Needs a
            text to run the model on. Without a tokenizer, and on GPUs, each channel is rounded by itself, and the
            report says so.
        key_whitening: whether keys and queries are multiplied by matrices that make keys vary more alike in all
            directions, for ``key_feedback``: two products with a matrix [D, D] of each KV head for a token.
    """

    name: ClassVar[str] = "quantize_kv"
    effect: ClassVar[Effect] = "lossy"
    after: ClassVar[tuple[str, ...]] = ("page_kv",)

    storage: Annotated[str, AfterValidator(_check_storage)] = "int8"
    value_storage: Annotated[str | None, AfterValidator(_check_codes)] = None
    layers: dict[int, Annotated[str | tuple[str, str], AfterValidator(_check_layer)]] = Field(default={})
    page: Page | None = None
    sink_pages: Annotated[int, Field(ge=0, le=1 << 10)] = 1
    recent_pages: Annotated[int, Field(ge=0, le=1 << 10)] = 1
    clip: Annotated[float, Field(gt=0, le=1)] | None = None
    token_factors: bool | None = None
    key_feedback: bool = False
    key_whitening: bool = False

    @property
    def context_tokens(self) -> int:
        """See :class:`Pass`: enough that a page was rounded."""
        return (self.sink_pages + self.recent_pages + 2) * (self.page or PAGE)

    def storages(self, number: int) -> tuple[str, str]:
        """Return the storages of keys and of values of a layer."""
        storage = self.layers.get(number, (self.storage, self.value_storage or self.storage))
        return (storage, storage) if isinstance(storage, str) else storage

    def share_of_codes(self, storage: str) -> float:
        """Return what codes span of what numbers span; 1 where a storage is floats."""
        return _CLIPS.get(storage, 1.0) if self.clip is None or storage not in LEVELS else self.clip

    def has_factors(self, storage: str) -> bool:
        """Return whether keys in a storage get a factor per token."""
        return storage in LEVELS and (storage in _WITH_FACTORS if self.token_factors is None else self.token_factors)

    def rewrite(self, model: ir.Model, context: Context) -> None:
        """Change the storage of every cache; say why where there is none in pages.

        Raises:
            InputError: options do not fit one another, the pages or the target; or the model may not be run on a text.
        """
        page_attention(model, context, self.page or PAGE)
        self._check(context.target)
        self._check_layers(model.graph)
        layers = {node: self._new_layer(node, context) for node in kv_nodes(model.graph)}
        new_layers = {node: layer for node, layer in layers.items() if layer is not None}
        with_feedback = [node for node, layer in new_layers.items() if layer.attributes.key_feedback]
        try:
            moments = self._moments(model, with_feedback, context)
        except MissingTokenizerError:
            moments = {}
            for node in with_feedback:
                context.ledger.skipped(node, NO_TEXT())
                kv = replace(new_layers[node].attributes, key_feedback=0)
                new_layers[node] = replace(new_layers[node], attributes=kv)
        for node, layer in new_layers.items():
            kv = layer.attributes
            connect(model.graph, node, layer)
            if node in moments:
                _round_for_queries(model.graph, node, layer, *moments[node])
            floats = FLOATS(first=self.sink_pages, newest=self.recent_pages) if kv.levels is not None else None
            shares = {"keys": f"{kv.clip:.0%}", "values": f"{kv.share_of_values:.0%}"}
            clip = CLIP_SHARE(**shares) if min(kv.clip, kv.share_of_values) < 1 else None
            factors, feedback = TOKEN_FACTORS() if kv.token_factors else None, FEEDBACK() if kv.key_feedback else None
            white = WHITENING() if kv.key_feedback and self.key_whitening else None
            facts = {"factors": factors, "feedback": feedback, "whitening": white, "clip": clip, "floats": floats}
            context.ledger.changed(node, CACHE_STORED(storage=kv.storage_name, page=kv.page, **facts), [node])
        describe(model)

    def _check(self, target: str) -> None:
        """Refuse options that do not fit one another or the target."""
        pairs = {(self.storage, self.value_storage or self.storage), *map(self.storages, self.layers)}
        for storage, value_storage in sorted(pairs - {(_FLOATS, _FLOATS)}):
            self._check_storages(storage, value_storage, target)
        integer = any(storage in LEVELS for storage, _ in pairs)
        refusals = [
            (
                not integer and self.clip is not None and self.clip < 1,
                f"clip is a share of what codes span, and {self.storage} has no codes",
                "leave clip of quantize_kv out",
            ),
            (
                not integer and bool(self.token_factors),
                f"token_factors belong to keys of integers, and {self.storage} has no scales",
                "leave token_factors of quantize_kv out",
            ),
            (
                not integer and self.key_feedback,
                f"key_feedback is for keys of integers, and {self.storage} has no codes",
                "leave key_feedback of quantize_kv out",
            ),
            (
                self.key_whitening and not self.key_feedback,
                "key_whitening is for keys that key_feedback rounds, and is worth little alone",
                "set key_feedback of quantize_kv too, or leave key_whitening out",
            ),
        ]
        for is_refused, reason, remedy in refusals:
            if is_refused:
                raise InputError(reason, remedy=remedy)

    def _check_storages(self, storage: str, value_storage: str, target: str) -> None:
        """Refuse storages of keys and values that do not fit one another or the target."""
        of_pair, is_pair = (
            f"quantize_kv stores keys as {storage} and values as {value_storage}",
            storage != value_storage,
        )
        refusals = [
            (
                is_pair and not {storage, value_storage} <= set(LEVELS),
                f"{of_pair}: pages of both have one type",
                f"choose storage of quantize_kv among {', '.join(LEVELS)}, or leave value_storage out",
            ),
            (
                is_pair and target == "ort-cuda",
                f"{of_pair}, and kernels on GPUs store both alike",
                "leave value_storage of quantize_kv out, or choose --target ort-cpu",
            ),
            (
                target == "ort-cuda" and not STORAGE_OF[storage].on_gpus,
                f"quantize_kv stores caches as {storage}, and kernels on GPUs know no such codes",
                "choose int8 or int4, or --target ort-cpu",
            ),
            (
                self.has_factors(storage) and target == "ort-cuda",
                "quantize_kv gives keys a factor per token, and kernels on GPUs know none",
                "leave token_factors of quantize_kv out, or choose --target ort-cpu",
            ),
        ]
        for is_refused, reason, remedy in refusals:
            if is_refused:
                raise InputError(reason, remedy=remedy)

    def _check_layers(self, graph: ir.Graph) -> None:
        """Refuse layers that the graph has no cache of."""
        numbers = {layer_of(node).number for node in kv_nodes(graph)}
        unknown = sorted(self.layers.keys() - numbers)
        if unknown and numbers:
            raise InputError(
                f"the step quantize_kv names layer {unknown[0]}, and the caches of the graph are {sorted(numbers)}",
                remedy="name layers as past_key_values.N does",
            )

    def _new_layer(self, node: ir.Node, context: Context) -> PagedLayer | None:
        """Return what a node is to say of its cache; ``None`` where it stays as it is, which the ledger then says."""
        layer = layer_of(node)
        storage, value_storage = self.storages(layer.number)
        if storage == _FLOATS:
            context.ledger.skipped(node, LEFT_IN_FLOATS())
            return None
        if layer.attributes.storage != _FLOATS:
            context.ledger.skipped(node, STORED_ALREADY(storage=layer.attributes.storage_name))
            return None
        kv = self.attributes(layer, storage, value_storage)
        if layer.head_size > kv.most_channels:
            limit = kv.most_channels
            fact = WIDE_HEADS(storage=kv.storage_name, most=limit, head_size=layer.head_size)
            context.ledger.skipped(node, fact)
            return None
        if layer.head_size % kv.unit:
            head_size = layer.head_size
            context.ledger.skipped(node, UNEVEN_HEADS(storage=kv.storage_name, unit=kv.unit, head_size=head_size))
            return None
        has_feedback = storage in LEVELS and self._has_feedback(node, layer, context)
        return replace(layer, attributes=replace(kv, key_feedback=int(has_feedback)))

    def attributes(self, layer: PagedLayer, storage: str, value_storage: str) -> KVAttributes:
        """Return what a layer says when keys and values are stored so; ``key_feedback`` stays as it is.

        Raises:
            InputError: pages have a number of tokens that a storage cannot pack.
        """
        page, integer = self.page or layer.attributes.page, storage in LEVELS
        # latents have no values of their own
        of_values = "" if layer.attributes.value_size else value_storage
        kv = replace(layer.attributes, page=PAGES[-1], storage=storage, value_storage=of_values)
        if page % kv.unit:
            raise InputError(
                f"{kv.storage_name} packs {kv.unit} numbers at a time, and pages of {page} tokens are no multiple",
                node=f"layer {layer.number}",
                remedy=f"set page of quantize_kv to a multiple of {kv.unit}",
            )
        return replace(
            kv,
            page=page,
            sink_pages=self.sink_pages if integer else 0,
            recent_pages=self.recent_pages if integer else 0,
            clip=self.share_of_codes(storage),
            value_clip=self.share_of_codes(of_values or storage),
            token_factors=int(self.has_factors(storage)),
        )

    def _has_feedback(self, node: ir.Node, layer: PagedLayer, context: Context) -> bool:
        if not self.key_feedback:
            return False
        if context.target == "ort-cuda":
            context.ledger.skipped(node, GPU_FEEDBACK())
            return False
        if layer.attributes.value_size:
            context.ledger.skipped(node, LATENT_FEEDBACK())
            return False
        return True

    def _moments(
        self, model: ir.Model, nodes: Collection[ir.Node], context: Context
    ) -> dict[ir.Node, tuple[InputStatistics, InputStatistics | None]]:
        """Return what the queries of some nodes look like, and with ``key_whitening`` their keys; report it."""
        if not nodes:
            return {}
        queries = {node: _read_value(node, "query") for node in nodes}
        keys = {node: _read_value(node, "key") for node in nodes} if self.key_whitening else {}
        values = [*queries.values(), *keys.values()]
        moments = context.statistics.at_all_positions(model, values, context.max_positions)
        digest = hashlib.sha256("".join(moments[value].digest for value in values).encode()).hexdigest()
        first = moments[values[0]]
        fact = STATISTICS(
            inputs="queries and keys" if keys else "queries",
            layers=len(queries),
            tokens=first.tokens,
            text=first.text[:16],
            digest=digest[:16],
        )
        context.ledger.report_change("statistics", fact)
        return {node: (moments[query], moments[keys[node]] if keys else None) for node, query in queries.items()}


def _read_value(node: ir.Node, name: str) -> ir.Value:
    value = input_of(node, name)
    assert value is not None
    return value


def _round_for_queries(
    graph: ir.Graph, node: ir.Node, layer: PagedLayer, queries: InputStatistics, keys: InputStatistics | None
) -> None:
    """Give a node the matrices by which it rounds keys; with statistics of keys, multiply what it reads by some."""
    heads, size = layer.attributes.kv_heads, layer.head_size
    moments = moments_by_head(queries.hessian().numpy(), heads, size)
    if keys is not None:
        matrices = whitening(moments_by_head(keys.hessian().numpy(), heads, size))
        inverses = np.linalg.inv(matrices)
        for name, factors in (("query", inverses), ("key", matrices), ("sink_query", inverses)):
            _multiply_heads(graph, node, name, factors.astype(np.float32))
        moments = inverses @ moments @ inverses
    index = schema_of(node).index("feedback")
    node.resize_inputs(index + 1)
    node.replace_input_with(index, new_weight(graph, f"{node.name}.feedback", ir.tensor(key_feedback(moments))))


def _multiply_heads(graph: ir.Graph, node: ir.Node, name: str, matrices: npt.NDArray[np.float32]) -> None:
    """Multiply the heads of an input of attention by symmetric matrices [Hk, D, D], query heads by those of theirs."""
    x = _read_value(node, name)
    assert x.shape is not None
    if len(x.shape) < 3:
        return  # there is no such input
    heads, size = matrices.shape[:2]
    batch, length, width = x.shape
    assert isinstance(width, int)
    make = Inserter(graph, node, f"{node.name}.{name}.whitening")
    # zeros stand for the sizes that there are
    shape = make.integers([0, 0, heads, width // (heads * size), size])
    dims = [batch, length, heads, width // (heads * size), size]
    by_head = make.op("Reshape", [x, shape], dims, x.dtype, "heads")
    numbers = matrices if x.dtype is None else matrices.astype(x.dtype.numpy())
    weight = new_weight(graph, f"{node.name}.{name}.whitening", ir.tensor(numbers))
    product = make.op("MatMul", [by_head, weight], dims, x.dtype, "product")
    flat = make.op("Reshape", [product, make.integers([0, 0, width])], list(x.shape), x.dtype, "flat")
    node.replace_input_with(schema_of(node).index(name), flat)
