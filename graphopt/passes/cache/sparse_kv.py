"""Attention that reads a part of its cache: the first and the newest tokens, and pages that look worth it."""

from __future__ import annotations

import inspect
from pathlib import Path  # noqa: TC003 - pydantic reads it when the program runs
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, create_model

from graphopt.analysis.structure.heads import ORIGIN, HeadScores, Rank
from graphopt.analysis.structure.paged_caches import PagedLayer, describe, kv_nodes, layer_of
from graphopt.errors import InputError
from graphopt.graph.diagnostics import Effect, Fact, Rule
from graphopt.passes.base import Pass
from graphopt.passes.common.paging.paged_attention import Page, page_attention
from graphopt.passes.common.paging.positions import unbind_positions
from graphopt.passes.common.paging.states import change
from graphopt.runtime_ops.kv_attention.spec.attributes import MOST_CHANNELS
from graphopt.runtime_ops.kv_attention.spec.policies import POLICIES, Parameter, Policy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import onnx_ir as ir

    from graphopt.passes.context import Context, Ledger, Statistics

_PAGE = 64

_MOST_TOKENS = 1 << 30

READS = Rule(
    "sparse_kv.reads",
    "{policies}: reads {sinks} first and {recent} newest tokens",
    pages=", besides {pages}",
    compensate=", and the mean of what streaming drops",
)
ORIGIN_UNKNOWN = Rule(
    "sparse_kv.origin-unknown", "the graph does not say what it was made from: only its heads were compared"
)
OWN_WINDOW = Rule("sparse_kv.own-window", "the model's own window of {window} tokens is all that it reads")
WIDE_HEADS = Rule(
    "sparse_kv.wide-heads", "its heads have {size} numbers, and pages are chosen or summed up of up to {most}"
)
LATENT_PAGES = Rule(
    "sparse_kv.latent-pages", "its cache holds latents, whose pages are read by all or by streaming heads"
)
BIASED_PAGES = Rule(
    "sparse_kv.biased-pages", "its scores have a bias by distance, and its pages are read by all or by streaming heads"
)
HAS_POLICIES = Rule("sparse_kv.has-policies", "its heads have policies already")
PAGE_STAYS = Rule("sparse_kv.page-stays", "its pages of {page} tokens are stored as {storage}: page stays as it is")
LEFT_DENSE = Rule("sparse_kv.left-dense", "the recipe leaves it dense")


def _option_of(parameter: Parameter) -> tuple[Any, Any]:
    """Return the type and the default of the option that is a parameter of a policy."""
    kind: Any = type(parameter.absent)
    if parameter.choices:
        kind = Literal[parameter.choices]
    elif isinstance(parameter.option, bool):
        kind = bool
    elif parameter.option is None:  # what would be the same as to leave the option out is not one of its values
        kind = Annotated[kind, Field(gt=parameter.absent, le=parameter.most)] | None
    else:
        kind = Annotated[kind, Field(ge=parameter.least, le=parameter.most or _MOST_TOKENS)]
    return kind, parameter.option


if TYPE_CHECKING:

    class _PolicyOptions(Pass):
        """Options of the pass that are chosen by policies, and the parameters of all policies."""

        def __getattr__(self, name: str) -> Any: ...

else:
    _Name = Literal[tuple(POLICIES)]
    _PolicyOptions = create_model(
        "_PolicyOptions",
        __base__=Pass,
        __module__=__name__,
        policy=(_Name, "retrieval"),
        layers=(dict[int, _Name | tuple[_Name, ...]], Field(default={})),
        **{parameter.name: _option_of(parameter) for policy in POLICIES.values() for parameter in policy.parameters()},
    )


class SparseKV(_PolicyOptions):
    """Let each query read only a part of its cache, chosen head by head inside the operator.

    before::

        KVAttention(q, k, v, ...; policies=[0])                                  position p reads all j <= p

    after::

        KVAttention(q, k, v, ...; policies=[1], sinks, recent)                   j < sinks or j > p - recent
        KVAttention(q, k, v, ..., summaries; policies=[2], budget, mass)         and the best pages besides

    Streaming: the first tokens take the attention that has nowhere to go, so they stay (StreamingLLM, Xiao et al.
    2024; LM-Infinite, Han et al. 2024); if all heads of a layer stream, its cache stops growing, and if all layers
    do, positions count inside the cache and text has no maximum length
    (:mod:`graphopt.passes.common.paging.positions`). Retrieval: a page's score is the most that a key in its bounds
    could score, sum over c of max(q_c min_c, q_c max_c) (Quest, Tang et al. 2024), or that of its mean key
    (TriForce, Sun et al. 2024); query heads that share a KV head choose together. Some heads look far and others do
    not, so policies may be given per layer and head, or retrieval heads found by calibration and all others made to
    stream (RazorAttention, Tang et al. 2024; LServe, Yang et al. 2025). With a budget of all pages retrieval is
    dense attention.

    How many pages a query needs depends on the query. With ``mass`` it reads as many as hold that share of the softmax
    of scale times the scores (top-p, Twilight, Lin et al. 2025), at most ``budget``. With ``channels`` only the largest
    channels of the queries that choose together make a score (SparQ, Ribar et al. 2024); a page's summary lies
    together, so that saves no bytes here. With ``compensate`` what streaming drops is one token more: its mean key,
    with log N added to the score for N tokens, and its mean value (RazorAttention). Such a model stays within its
    trained positions, since the mean is of keys at any distance.

    A layer with a window of its own reads no more than that already, and is left alone.

    A prompt is read densely by retrieval's heads at the cost of a choice per query. ``sparse_prefill`` leaves decoding
    dense, and lets blocks of a prompt's queries choose together: some of them are asked in full, and pages are left out
    as long as those hold less than the rest of ``prefill_mass``. Heads that stream skip pages in prompts too.

    Standard attention is rewritten as by ``page_kv`` first.

    The parameters of all policies are options too.

    Attributes:
        policy: of every head that ``layers`` does not name; with ``heads``, of the retrieval heads.
        layers: by the N of a layer's ``past_key_values.N``: a policy for all its heads, or one for each KV head.
        heads: scores by which retrieval heads are found; all others then stream. A file that ``graphopt heads`` wrote,
            from the recipe's folder or the current one; the manifest holds the scores themselves.
        retrieval_share: with ``heads``, the share of KV heads that are retrieval heads.
        rank: with ``heads``, which of the scores say so, see :meth:`HeadScores.retrieval_heads`.
        sinks: first tokens that are always read.
        recent: newest tokens that are always read.
        page: tokens of a page; ``None`` keeps it, or is 64 without pages.
    """

    name: ClassVar[str] = "sparse_kv"
    effect: ClassVar[Effect] = "lossy"
    after: ClassVar[tuple[str, ...]] = (
        "page_kv",
        "quantize_kv",
    )

    @property
    def context_tokens(self) -> int:
        """See :class:`Pass`: more tokens than queries read, so that some are left out."""
        page = self.page or _PAGE
        if self.policy == "sparse_prefill":
            block: int = self.query_block
            return self.sinks + self.recent + block + 2 * page
        tokens = (self.budget + 2) * page if self.policy == "retrieval" else 0
        tokens = tokens or 2 * page * self.compensate
        return self.sinks + self.recent + tokens + 2 * page

    heads: HeadScores | Path | None = None
    retrieval_share: Annotated[float, Field(ge=0, le=1)] = 0.15
    rank: Rank = "razor"
    sinks: Annotated[int, Field(ge=0, le=_MOST_TOKENS)] = 64
    recent: Annotated[int, Field(ge=1, le=_MOST_TOKENS)] = 256
    page: Page | None = None

    def self_contained(self, statistics: Statistics) -> Self:
        """See :class:`Pass`."""
        return self.model_copy(update={"heads": statistics.heads(self.heads)})

    if TYPE_CHECKING:

        def __init__(self, **options: Any) -> None: ...

    def rewrite(self, model: ir.Model, context: Context) -> None:
        """Give each cache its policies.

        Raises:
            InputError: the options name a layer that the graph lacks, or a wrong number of heads.
        """
        ledger = context.ledger
        page_attention(model, context, self.page or _PAGE)
        self._check(context.target)
        scores = context.statistics.heads(self.heads)
        nodes = {layer_of(node).number: node for node in kv_nodes(model.graph)}
        unknown = sorted(self.layers.keys() - nodes.keys())
        if unknown and nodes:
            raise InputError(
                f"the step sparse_kv names layer {unknown[0]}, and the caches of the graph are {sorted(nodes)}",
                remedy="name layers as past_key_values.N does",
            )
        policies_by_layer = self._policies_by_layer(model, [layer_of(node) for node in nodes.values()], scores, ledger)
        for node in nodes.values():
            self._rewrite_node(model.graph, node, policies_by_layer, ledger)
        unbind_positions(model.graph, ledger)
        describe(model)

    def _check(self, target: str) -> None:
        """Refuse options that would have no effect on any head, do not fit one another, or that the target lacks."""
        options = self
        names = {name for names in options.layers.values() for name in ([names] if isinstance(names, str) else names)}
        names |= {options.policy} | ({"streaming"} if options.heads else set())
        for policy in POLICIES.values():
            for parameter in policy.parameters():
                is_stated = not parameter.option and getattr(options, parameter.name)
                if is_stated and policy.name not in names:
                    raise InputError(
                        f"the step sparse_kv says {parameter.name}, which is for heads of the policy {policy.name}, "
                        "and gives none that",
                        remedy=f"leave {parameter.name} out, or give {policy.name} as the policy or among the layers",
                    )
            if policy.name in names:
                _check_parameters(policy.of_options(dict(options)))
                if policy.in_blocks and target == "ort-cuda":
                    raise InputError(
                        f"the step sparse_kv gives heads the policy {policy.name}, and GPUs have no kernels for it",
                        remedy="choose another policy, or --target ort-cpu",
                    )

    def _policies_by_layer(
        self, model: ir.Model, layers: Sequence[PagedLayer], scores: HeadScores | None, ledger: Ledger
    ) -> dict[int, tuple[str, ...]]:
        """Return the policies of the layers of which there are scores."""
        if scores is None or not layers:
            return {}
        if self.policy == "streaming":
            raise InputError(
                "the step sparse_kv has a calibration of heads, and retrieval heads that stream like all others",
                remedy="`policy` says what retrieval heads read: dense or retrieval",
            )
        kv_heads = {layer.number: layer.attributes.kv_heads for layer in layers if not layer.attributes.window}
        scored_heads = {number: len(heads) for number, heads in scores.layers.items()}
        if kv_heads != scored_heads:
            raise InputError(
                f"the calibration is of another model: its layers have {scored_heads} KV heads, those of the graph "
                f"{kv_heads}",
                remedy="run `graphopt heads` on this model",
            )
        _check_origin(model.metadata_props.get(ORIGIN), scores.origin, ledger)
        retrieval_heads = scores.retrieval_heads(self.retrieval_share, self.rank)
        return {
            number: tuple(self.policy if (number, head) in retrieval_heads else "streaming" for head in range(heads))
            for number, heads in kv_heads.items()
        }

    def _rewrite_node(
        self, graph: ir.Graph, node: ir.Node, policies_by_layer: Mapping[int, tuple[str, ...]], ledger: Ledger
    ) -> None:
        layer, options = layer_of(node), self
        if layer.attributes.window:
            ledger.skipped(node, OWN_WINDOW(window=layer.attributes.window))
            return
        if not all(policy.reads_all and not policy.in_blocks for policy in layer.attributes.policies_in_use):
            ledger.skipped(node, HAS_POLICIES())
            return
        policies = self._policies(layer, node, policies_by_layer)
        chooses = any(POLICIES[name].of_options(dict(self)).chooses for name in policies)
        if layer.attributes.value_size and (chooses or options.compensate):
            ledger.skipped(node, LATENT_PAGES())
            return
        if layer.attributes.slopes and (chooses or options.compensate):
            ledger.skipped(node, BIASED_PAGES())
            return
        if layer.head_size > MOST_CHANNELS and (not set(policies) <= {"dense", "streaming"} or options.compensate):
            ledger.skipped(node, WIDE_HEADS(size=layer.head_size, most=MOST_CHANNELS))
            return
        page = self._page_of(layer, node, ledger)
        if all(POLICIES[name].reads_all and not POLICIES[name].in_blocks for name in policies):
            ledger.skipped(node, LEFT_DENSE())
            return
        if options.channels is not None and options.channels > layer.head_size:
            raise InputError(
                f"the step sparse_kv judges pages by {options.channels} channels, and a head has {layer.head_size}",
                node=node.name,
                remedy=f"give {layer.head_size} at most, or leave channels out",
            )
        change(graph, node, {**node_attributes(options, policies), "page": page})
        reads = READS(
            policies=policies,
            sinks=options.sinks,
            recent=options.recent,
            pages=self._pages_besides(policies),
            compensate=options.compensate and "streaming" in policies,
        )
        ledger.changed(node, reads, [node])

    def _page_of(self, layer: PagedLayer, node: ir.Node, ledger: Ledger) -> int:
        """Return the tokens of the layer's pages: those of codes keep their size."""
        attributes = layer.attributes
        page: int = self.page or attributes.page
        if attributes.storage != "float32" and page != attributes.page:
            ledger.skipped(node, PAGE_STAYS(page=attributes.page, storage=attributes.storage_name))
            return attributes.page
        return page

    def _pages_besides(self, policies: Sequence[str]) -> Fact | list[Fact] | None:
        """Return what policies say of the pages that queries read besides the first and the newest tokens."""
        besides = [POLICIES[name].of_options(dict(self)).besides() for name in dict.fromkeys(policies)]
        facts = [fact for fact in besides if fact is not None]
        return facts[0] if len(facts) == 1 else facts or None

    def _policies(
        self, layer: PagedLayer, node: ir.Node, policies_by_layer: Mapping[int, tuple[str, ...]]
    ) -> tuple[str, ...]:
        policy_names = self.layers.get(layer.number, policies_by_layer.get(layer.number, self.policy))
        policies = (policy_names,) if isinstance(policy_names, str) else policy_names
        heads = layer.attributes.kv_heads
        if len(policies) not in (1, heads):
            raise InputError(
                f"the step sparse_kv gives layer {layer.number} {len(policies)} policies, and it has {heads} KV heads",
                node=node.name,
                remedy=f"give one policy, or {heads}",
            )
        return policies[:1] if len(set(policies)) == 1 else policies


def _check_parameters(policy: Policy) -> None:
    """Refuse parameters of a policy that do not fit one another."""
    try:
        policy.check()
    except ValueError as error:
        raise InputError(
            f"the step sparse_kv has options that do not fit: {error}", remedy="change one of them"
        ) from None


SparseKV.__doc__ = "\n".join(
    filter(None, [inspect.getdoc(SparseKV), *(policy.described_parameters() for policy in POLICIES.values())])
)


def _check_origin(origin: str | None, digest: str, ledger: Ledger) -> None:
    """Refuse a calibration of another model than the graph was made from."""
    if origin is None:
        ledger.skipped("heads", ORIGIN_UNKNOWN())
    elif origin != digest:
        raise InputError(
            f"the calibration is of another model: it is of {digest[:12]}..., the graph of {origin[:12]}...",
            remedy="run `graphopt heads` on this model, or on the one that it was made from",
        )


def node_attributes(options: SparseKV, policies: Sequence[str]) -> dict[str, Any]:
    """Return the attributes of a node whose heads have ``policies``: one for all, or one for each."""
    names = set(policies)
    attributes: dict[str, Any] = {"sinks": options.sinks, "recent": options.recent}
    for name, policy in POLICIES.items():
        for parameter in policy.parameters():
            attributes[parameter.name] = (
                parameter.attribute(getattr(options, parameter.name)) if name in names else parameter.absent
            )
    return {"policies": tuple(POLICIES[name].number for name in policies), **attributes}
