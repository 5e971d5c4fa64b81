"""What a standard ``Attention`` node means, where that is what ``KVAttention`` computes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.analysis.structure.ports import CachePort, past_port
from graphopt.graph.diagnostics import Fact, Rule
from graphopt.passes.common.choices import Choice, choice_of, chosen_indices
from graphopt.passes.common.masks import Window
from graphopt.passes.common.paging.token_wise import TokenWise, token_wise_of
from graphopt.passes.common.sinks import SCORES, sinks_of
from graphopt.runtime_ops.kv_attention.spec.attributes import LANES, MOST_LATENT, MOST_OF_FLOATS

if TYPE_CHECKING:
    from graphopt.passes.common.masks import MaskEvaluator

_QUERY, _KEY, _VALUE, _MASK, _PAST_KEY, _PAST_VALUE, _VALID = range(7)


NO_CACHE = Rule("page_kv.no-cache", "it has no cache of its own among the inputs of the graph")
TOLD_LENGTHS = Rule("page_kv.told-lengths", "its row lengths come from the input nonpad_kv_seqlen")
SCORES_READ = Rule("page_kv.scores-read", "its scores are read elsewhere")
CACHE_READ = Rule("page_kv.cache-read", "its cache is read elsewhere in the graph")
HEADS_UNKNOWN = Rule("page_kv.heads-unknown", "the graph does not state the number and size of its heads")
HEADS_DO_NOT_FIT = Rule(
    "page_kv.heads-do-not-fit",
    "its queries, keys and values have heads of {query}, {key} and {value} numbers that do not fit",
)
HEAD_SIZE = Rule("page_kv.head-size", "its heads have {size} numbers, and KVAttention takes up to {most}")
ROW_SIZE = Rule(
    "page_kv.row-size",
    "its latent has {rank} of {size} numbers, and KVAttention takes multiples of 16 up to {most}",
)
SEVERAL_CHOICES = Rule("page_kv.several-choices", "its mask {mask} shows what {count} nodes choose, and not one")
OTHER_CHOICE = Rule(
    "page_kv.other-choice",
    "its mask {mask} means something else than causal, not padding, and among what the indexer of {node} chose",
)
OTHER_SCORES = Rule("page_kv.other-scores", "{node} chooses among more or less than what is causal and no padding")
NOT_FLOAT32 = Rule("page_kv.not-float32", "it does not compute in float32")
NOT_CAUSAL = Rule("page_kv.not-causal", "it is not causal")
BIAS_AND_MORE = Rule("page_kv.bias-and-more", "its scores have a bias by distance, and a soft cap or sinks")
HEADS_OF_BIAS = Rule("page_kv.heads-of-bias", "its mask adds biases of {biases} heads to {heads} heads of queries")
MASK_NOT_UNDERSTOOD = Rule("page_kv.mask-not-understood", "its mask {mask} is not understood: {why}")


@dataclass(frozen=True)
class Meaning:
    """Causal attention over a cache.

    Attributes:
        number: N in ``past_key_values.N.key``.
        query_heads: heads of queries.
        kv_heads: heads of keys and values.
        head_size: numbers of a query, key or value.
        scale: what scores are multiplied by.
        softcap: the soft cap of scores; 0: none.
        window: the query at position p sees positions > p - window; 0: all. If it is a chunk, positions from the
            last multiple of it on.
        sinks: logits that join the softmax, float32 [1, query heads, 1, 1]; ``None`` without.
        latent: what it reads where values are a part of keys.
        source: the node whose keys and values it reads, see :func:`source_of`; ``None`` where it has its own.
        choice: what a trained indexer chooses of the positions that it could see; ``None`` where it sees all.
        token_wise: what it reads of a cache that grows outside of it; ``None`` where it appends to its own.
        slopes: of each query head, of biases by distance (ALiBi, Press et al. 2022); none without.
    """

    number: int
    query_heads: int
    kv_heads: int
    head_size: int
    scale: float
    softcap: float
    window: Window
    sinks: ir.Value | None = None
    latent: Latent | None = None
    source: ir.Node | None = None
    choice: Choice | None = None
    token_wise: TokenWise | None = None
    slopes: tuple[float, ...] = ()

    @property
    def index_size(self) -> int:
        """Numbers of the key of an indexer that a row of its cache has behind a latent; 0 without."""
        return 0 if self.choice is None or self.choice.layer != self.number else self.choice.size

    @property
    def stored_size(self) -> int:
        """Numbers of a query, key or value with the zeros behind it that its cache wants."""
        return -(-(self.head_size + self.index_size) // LANES) * LANES

    @property
    def value_size(self) -> int:
        """Numbers of a value where it is a part of the key; 0 where it is none."""
        return 0 if self.latent is None else self.latent.rank


@dataclass(frozen=True)
class Latent:
    """A cache of rows that are keys, and values in their first part.

    Attributes:
        rank: numbers of the first part.
        parts: what is new of the row, float32 [batch, 1, length, width] each.
        pasts: the inputs that hold the parts of stored tokens.
        presents: the parts of all tokens.
    """

    rank: int
    parts: tuple[ir.Value, ...]
    pasts: tuple[ir.Value, ...]
    presents: tuple[ir.Value, ...]


def latent_of(node: ir.Node) -> Latent | None:
    """Return the latent that an ``Attention`` without a cache of its own reads, see ``absorb_latent``.

    c = Concat(past_c, new_c);  r = Concat(past_r, new_r);  Attention(q, Concat(c, r), c, m)
    """
    inputs = [*node.inputs, *[None] * 7][:7]
    key, value = inputs[_KEY], inputs[_VALUE]
    if key is None or value is None or any(inputs[index] is not None for index in (_PAST_KEY, _PAST_VALUE)):
        return None
    row = key.producer()
    is_row = row is not None and row.op_type == "Concat" and row.attributes.get_int("axis", 0) in (-1, 3)
    presents = [value] if key is value else list(row.inputs) if row is not None and is_row else []
    past_and_new = [_past_and_new(present) for present in presents if present is not None]
    pairs = [pair for pair in past_and_new if pair is not None]
    if not pairs or len(pairs) != len(presents) or presents[0] is not value or value.shape is None:
        return None
    ports = [past_port(past) for past, _ in pairs]
    layers = {port.layer for port in ports if port is not None and not port.is_recurrent}
    rank = value.shape[-1]
    if len(layers) != 1 or None in ports or len(value.shape) != 4 or value.shape[1] != 1 or not isinstance(rank, int):
        return None
    pasts, parts = zip(*pairs, strict=True)
    return Latent(rank, parts, pasts, tuple(present for present in presents if present is not None))


def _past_and_new(value: ir.Value) -> tuple[ir.Value, ir.Value] | None:
    """Return the past and what is new, of which ``value`` is the Concat along the length."""
    node = value.producer()
    if node is None or node.op_type != "Concat" or node.domain or len(node.inputs) != 2:
        return None
    past, new = node.inputs
    if past is None or new is None or not past.is_graph_input() or node.attributes.get_int("axis", 0) not in (2, -2):
        return None
    return past, new


def source_of(node: ir.Node) -> ir.Node | None:
    """Return the ``Attention`` whose cache ``node`` reads behind it: a layer without keys and values (Gemma 3n).

    _, present_key, present_value = Attention(q', k, v, m, past_key, past_value)
    Attention(q, present_key, present_value, m)
    """
    inputs = [*node.inputs, *[None] * 7][:7]
    key, value = inputs[_KEY], inputs[_VALUE]
    if key is None or value is None or any(inputs[index] is not None for index in (_PAST_KEY, _PAST_VALUE, _VALID)):
        return None
    source = key.producer()
    if source is None or source.op_type != "Attention" or source.domain or source is not value.producer():
        return None
    has_cache = len(source.inputs) > _PAST_VALUE and past_port(source.inputs[_PAST_KEY]) is not None
    return source if has_cache and (key.index(), value.index()) == (1, 2) else None


def meaning_of(node: ir.Node, evaluator: MaskEvaluator) -> Meaning | Fact:
    """Return what the ``Attention`` node means, or why ``KVAttention`` cannot compute it."""
    inputs = [*node.inputs, *[None] * 7][:7]
    query, key, value = inputs[_QUERY : _VALUE + 1]
    latent = latent_of(node)
    if latent is not None:
        return _meaning_of_latent(node, latent, evaluator)
    source, token_wise = source_of(node), token_wise_of(node)
    appending = inputs if source is None else source.inputs
    past_key, past_value = appending[_PAST_KEY : _PAST_VALUE + 1] if token_wise is None else token_wise.pasts
    cache = past_port(past_key)
    if cache is None or cache.part != "key" or past_port(past_value) != CachePort(cache.layer, "value"):
        return NO_CACHE()
    if inputs[_VALID] is not None:
        return TOLD_LENGTHS()
    sinks = sinks_of(node)
    if sinks is None and any(output.uses() or output.is_graph_output() for output in node.outputs[SCORES:]):
        return SCORES_READ()
    if any(source_of(use.node) is not node for output in node.outputs[1:3] for use in output.uses()):
        return CACHE_READ()
    sizes = [_heads(node, value, kind) for value, kind in ((query, "q"), (key, "kv"), (value, "kv"))]
    if None in sizes:
        return HEADS_UNKNOWN()
    (query_heads, size), (kv_heads, key_size), (value_heads, value_size) = (
        shape for shape in sizes if shape is not None
    )
    if not size == key_size == value_size or kv_heads != value_heads or query_heads % kv_heads:
        return HEADS_DO_NOT_FIT(query=size, key=key_size, value=value_size)
    if size > MOST_OF_FLOATS:
        return HEAD_SIZE(size=size, most=MOST_OF_FLOATS)
    if any(shape is not None and shape.dtype != ir.DataType.FLOAT for shape in (query, key, value)):
        return NOT_FLOAT32()
    scale = node.attributes.get_float("scale", 0.0) or 1.0 / math.sqrt(size)
    softcap = node.attributes.get_float("softcap", 0.0)
    reach = _reach(node, inputs[_MASK], query_heads, evaluator)
    if isinstance(reach, Fact):
        return reach
    logits = None if sinks is None else sinks[0]
    meaning = Meaning(cache.layer, query_heads, kv_heads, size, scale, softcap, reach[0], logits, source=source)
    meaning = replace(meaning, slopes=reach[1], token_wise=token_wise)
    # sinks have no distance, so what the biases of a query have in common would matter
    return BIAS_AND_MORE() if meaning.slopes and (softcap or sinks is not None) else meaning


def _meaning_of_latent(node: ir.Node, latent: Latent, evaluator: MaskEvaluator) -> Meaning | Fact:
    query, mask = node.inputs[_QUERY], node.inputs[_MASK] if len(node.inputs) > _MASK else None
    sinks = sinks_of(node)
    if sinks is None and any(output.uses() or output.is_graph_output() for output in node.outputs[1:]):
        return SCORES_READ()
    if any(
        use.node is not node and use.node.op_type != "Shape" and use.node is not _row_of(node)
        for present in latent.presents
        for use in present.uses()
    ):
        return CACHE_READ()
    widths = [_width(part) for part in latent.parts]
    queries = None if query is None else _heads(node, query, "q")
    size = sum(width for width in widths if width is not None)
    if queries is None or None in widths:
        return HEADS_UNKNOWN()
    if queries[1] != size:
        return HEADS_DO_NOT_FIT(query=queries[1], key=size, value=latent.rank)
    if size % LANES or latent.rank % LANES or size > MOST_LATENT:
        return ROW_SIZE(size=size, rank=latent.rank, most=MOST_LATENT)
    if any(value is not None and value.dtype != ir.DataType.FLOAT for value in (query, *latent.parts)):
        return NOT_FLOAT32()
    choice = None if mask is None else _choice(mask, evaluator)
    window = Window(0) if isinstance(choice, Choice) else choice or _window(node, mask, evaluator)
    if isinstance(window, Fact):
        return window
    scale = node.attributes.get_float("scale", 0.0) or 1.0 / math.sqrt(size)
    softcap = node.attributes.get_float("softcap", 0.0)
    port = past_port(latent.pasts[0])
    assert port is not None
    known_choice = choice if isinstance(choice, Choice) else None
    logits = None if sinks is None else sinks[0]
    meaning = Meaning(port.layer, queries[0], 1, size, scale, softcap, window, logits, latent, choice=known_choice)
    if meaning.index_size % LANES or meaning.stored_size > MOST_LATENT:
        return ROW_SIZE(size=meaning.stored_size, rank=latent.rank, most=MOST_LATENT)
    return meaning


def _choice(mask: ir.Value, evaluator: MaskEvaluator) -> Choice | Fact | None:
    """Return what an indexer chooses that a mask shows, or why that is not known; ``None`` for a mask of positions."""
    indices = chosen_indices(mask)
    if not indices:
        return None
    if len(indices) > 1:
        return SEVERAL_CHOICES(mask=mask.name, count=len(indices))
    choice = choice_of(evaluator.model.graph, indices[0])
    if isinstance(choice, Fact):
        return choice
    means_choice = evaluator.is_choice(mask)
    if means_choice is not True:
        return OTHER_CHOICE(mask=mask.name, node=choice.top.name) if means_choice is False else means_choice
    hides = evaluator.hides_unseen(choice.mask, is_shown=choice.is_shown)
    if hides is not True:
        return OTHER_SCORES(node=choice.top.name) if hides is False else hides
    return choice


def _row_of(node: ir.Node) -> ir.Node | None:
    """Return what makes the keys of ``node``."""
    key = node.inputs[_KEY]
    return None if key is None else key.producer()


def _width(value: ir.Value) -> int | None:
    width = None if value.shape is None or len(value.shape) != 4 or value.shape[1] != 1 else value.shape[-1]
    return width if isinstance(width, int) else None


def _reach(
    node: ir.Node, mask: ir.Value | None, heads: int, evaluator: MaskEvaluator
) -> tuple[Window, tuple[float, ...]] | Fact:
    """Return the window of the mask and the slopes of its biases, or why it is not understood."""
    slopes = _slopes(node, mask, heads, evaluator)
    if isinstance(slopes, Fact):
        return slopes
    window = _window(node, mask, evaluator, may_add=bool(slopes))
    return window if isinstance(window, Fact) else (window, slopes)


def _slopes(node: ir.Node, mask: ir.Value | None, heads: int, evaluator: MaskEvaluator) -> tuple[float, ...] | Fact:
    """Return the slopes of the biases that the mask adds for each query head, or why they are not understood."""
    if mask is None:
        return ()
    slopes = evaluator.slopes(mask, is_causal=node.attributes.get_int("is_causal", 0) == 1)
    if isinstance(slopes, Fact):
        return MASK_NOT_UNDERSTOOD(mask=mask.name, why=slopes)
    slopes = slopes * heads if len(slopes) == 1 else slopes
    return slopes if len(slopes) in (0, heads) else HEADS_OF_BIAS(biases=len(slopes), heads=heads)


def _window(node: ir.Node, mask: ir.Value | None, evaluator: MaskEvaluator, *, may_add: bool = False) -> Window | Fact:
    is_causal = node.attributes.get_int("is_causal", 0) == 1
    if mask is None:
        if not is_causal:
            return NOT_CAUSAL()
        return evaluator.without_mask()
    window = evaluator.window(mask, is_causal=is_causal, may_add=may_add)
    return MASK_NOT_UNDERSTOOD(mask=mask.name, why=window) if isinstance(window, Fact) else window


def _heads(node: ir.Node, value: ir.Value | None, kind: str) -> tuple[int, int] | None:
    """Return the number and the size of the heads of queries, keys or values."""
    if value is None or value.shape is None:
        return None
    dims = list(value.shape)
    heads = dims[1] if len(dims) == 4 else node.attributes.get_int(f"{kind}_num_heads", 0)
    width = dims[-1]
    if not isinstance(heads, int) or not isinstance(width, int) or not heads or len(dims) not in (3, 4):
        return None
    return (heads, width) if len(dims) == 4 else (heads, width // heads)
