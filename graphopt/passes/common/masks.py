"""Masks by meaning: arithmetic that means "causal and not padding", however it is written, becomes ``is_causal``.

    m = <any arithmetic>;  Where(<no visible key>, 0, Attention(q, k, v, m))
      ->   Attention(q, k, v, <padding, boolean>; is_causal=1)
      ->   Attention(q, k, v, <padding, boolean>)                            in an encoder

What the arithmetic means is found out by running it: the part of the graph that computes the mask is cut out and
evaluated on random batches, lengths, pasts and paddings, and compared with the definition (query i of the new tokens
sees key j iff j <= past + i and j is no padding; in an encoder, iff j is no padding). Exporters may change their node
chains; the meaning stays. Where a trained indexer chooses keys, known ones stand in their place (:mod:`.choices`).

onnxruntime's ``Attention`` gives zeros for a query that sees no key, which is what the guard around it spells out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from graphopt.analysis.structure.ports import ATTENTION_MASK, INPUTS_EMBEDS, past_port
from graphopt.errors import InputError
from graphopt.graph.diagnostics import Fact, Rule
from graphopt.graph.editing import bypass
from graphopt.ort.runner import part_of
from graphopt.passes.common.choices import KEPT_STEP, chosen_indices, part_with_known_choices
from graphopt.passes.common.nodes import scalar
from graphopt.tasks.ports import Array

if TYPE_CHECKING:
    from graphopt.passes.context import Context, Ledger
    from graphopt.tasks import Call

Bools = npt.NDArray[np.bool_]

_MASK, _PAST_KEY = 3, 4
_MEANINGS = ("causal and padding", "causal", "padding", "everything")
# (batch, new tokens, past): prefill, one step, several tokens onto a cache.
_INSTANCES = [(1, 1, 0), (1, 5, 0), (2, 3, 4), (3, 1, 6), (2, 4, 1), (1, 9, 40), (3, 9, 20)]
# A window or a chunk shows only in sequences longer than itself, and its size is a constant of the arithmetic. Beyond
# _LONGEST it takes too long to try. Constants from _ENDLESS on are no lengths: exporters write "to the end" so.
_LONGEST, _ENDLESS = 1 << 22, 1 << 31
# Any score added to a hidden key is at least this far below; exporters use the lowest float or -inf.
_HIDDEN = -1e4
# A bias that grows with the distance may be lower than that, where hidden keys have the lowest number.
_HIDDEN_OF_BIASES = -1e30
# Biases are products of a slope and a distance in float32, or sums of one with a multiple of the slope: each is rounded
# once or twice, so differences of two are by some 2^-24 of the larger one what they should be.
_ROUNDING = 2.0**-21


class Window(NamedTuple):
    """What a query sees of the tokens up to its own.

    Attributes:
        tokens: so many of the newest, or 0: all.
        is_chunk: only those of its own chunk of so many tokens (Llama 4). Chunks begin with the first token that is no
            padding.
    """

    tokens: int
    is_chunk: bool = False


@dataclass(frozen=True)
class _Instance:
    causal: Bools
    """[batch, 1, new tokens, keys]: which key each query may see by order alone."""
    padding: Bools
    """[batch, 1, 1, keys]: which key is a real token."""

    @property
    def keys(self) -> int:
        """How many there are, padding too."""
        return int(self.causal.shape[-1])

    def visible_keys(self, meaning: str) -> Bools:
        """[batch, 1, new tokens, keys]: which key each query sees if a mask means one of :data:`_MEANINGS`."""
        causal = self.causal if "causal" in meaning else np.ones_like(self.causal)
        return causal & (self.padding if "padding" in meaning else np.ones_like(self.padding))

    @property
    def distance(self) -> npt.NDArray[np.int64]:
        """[1, 1, new tokens, keys]: how many columns each key stands before each query."""
        new, keys = self.causal.shape[2:]
        lengths: npt.NDArray[np.int64] = (np.arange(new)[:, None] + keys - new - np.arange(keys)[None, :])[None, None]
        return lengths

    def positions(self, *, counts_padding: bool) -> npt.NDArray[np.int64]:
        """[batch or 1, keys]: the number of each key among all keys, or among those that are no padding."""
        if counts_padding:
            return np.arange(self.padding.shape[-1])[None]
        numbers: npt.NDArray[np.int64] = np.cumsum(self.padding[:, 0, 0], -1) - 1
        return numbers

    def in_window(self, window: Window) -> Bools:
        """[batch or 1, 1, new tokens, keys]: which key each query sees by order and a window."""
        if not window.tokens:
            return self.causal
        if not window.is_chunk:
            return self.causal & (self.distance < window.tokens)
        new, keys = self.causal.shape[2:]
        positions = np.arange(keys) - self.padding[:, 0, 0].argmax(-1)[:, None]
        chunks = positions // window.tokens
        is_alike: Bools = chunks[:, None, keys - new :, None] == chunks[:, None, None, :]
        return self.causal & is_alike


GUARD_REMOVED = Rule("canonicalize.guard-removed", "guard for queries that see no key removed")
GUARD_NOT_RUN = Rule("canonicalize.guard-not-run", "the condition of the guard cannot be evaluated on its own")
NO_GUARD = Rule("canonicalize.no-guard", "a Where behind Attention that is no guard for queries without a visible key")
NOT_FED = Rule("mask.not-fed", "the graph cannot be fed ({error})")
NOT_CUT_OUT = Rule("mask.not-cut-out", "its computation cannot be cut out of the graph ({error})")
FROM_ACTIVATIONS = Rule("mask.computed", "it depends on activations of the model")
TOO_LONG = Rule("mask.too-long", "its arithmetic has the constant {number}, too long a sequence to try")
NOT_RUN = Rule("mask.not-run", "its computation cannot be run on its own ({error})")
ADDS_BIAS = Rule("mask.adds-bias", "it adds a bias to visible scores")
NOT_CAUSAL = Rule(
    "mask.not-causal",
    "it is neither causal nor causal with padding, nor padding alone (a sliding window, perhaps)",
)
NO_WINDOW = Rule("mask.no-window", "it is neither causal, nor a sliding window, nor chunks, with padding or without")
NOT_TRIED = Rule("mask.not-tried", "it could not be run on a single sequence")
NO_CALLS = Rule("mask.no-calls", "nothing tells how {noun} is fed in sizes that would show what the mask means")
SHOWS_PADDING = Rule("mask.shows-padding", "it lets queries see padding, which a cache in pages does not store")

Evaluation = list[tuple[_Instance, Array]] | Fact


class MaskEvaluator:
    """Asks the runner for what parts of a graph compute, each once: layers share their masks."""

    def __init__(self, model: ir.Model, context: Context) -> None:
        self.model, self._task, self._runner = model, context.task, context.runner
        self._results: dict[str, Evaluation] = {}

    @cached_property
    def _has_padding(self) -> bool:
        return any(value.name == ATTENTION_MASK for value in self.model.graph.inputs)

    def run(self, value: ir.Value) -> Evaluation:
        """Run only what computes ``value``; return its result per instance, or why that cannot be done."""
        name = value.name or ""
        if name not in self._results:
            self._results[name] = self._run(value)
        return self._results[name]

    def _run(self, value: ir.Value) -> Evaluation:
        graph, task = self.model.graph, self._task
        try:
            task.check(graph)
        except InputError as error:
            return NOT_FED(error=error.message)
        try:
            part = self._part(value)
        except ValueError as error:
            return NOT_CUT_OUT(error=str(error))
        if part is None or any(node.op_type in ("Attention", "MatMul") for node in part.graph):
            return FROM_ACTIVATIONS()
        lengths = sorted(_numbers(part.graph))
        if lengths and lengths[-1] > _LONGEST:
            return TOO_LONG(number=lengths[-1])
        for port in part.graph.inputs:
            if past_port(port) is not None:
                # Only the length of a cache matters: with other sizes free, a long one is fed as [batch, 1, past, 1].
                port.shape = ir.Shape(["batch", "heads", "past", "size"])
            if port.name == INPUTS_EMBEDS:
                port.shape = ir.Shape(["batch", "length", "width"])  # likewise, fed as [batch, length, 1]
        # Of rows with padding only longer ones tell chunks of columns from chunks of tokens.
        lengths_around = [(1, 2, length + shift) for length in lengths for shift in (-2, -1, 0, 1)]
        lengths_around += [(2, 2, length + length // 2) for length in lengths]
        calls = list(task.calls(graph, _INSTANCES + lengths_around))
        if not calls:  # every meaning would agree with nothing
            return NO_CALLS(noun=task.noun)
        try:
            results = self._runner.run(part, [call.feeds for call in calls])
        except Exception as error:  # whatever onnxruntime raises: a mask that cannot be read is left alone
            # A table of so many positions has none for longer sequences.
            calls = [call for call in calls if lengths and call.past + call.length <= lengths[-1]]
            try:
                results = self._runner.run(part, [call.feeds for call in calls]) if calls else []
            except Exception:
                results = []
            if not results:
                return NOT_RUN(error=str(error).splitlines()[0])
        return [(_instance(call), outputs[0]) for call, outputs in zip(calls, results, strict=True)]

    def _part(self, value: ir.Value) -> ir.Model | None:
        """Return what computes ``value``; what a ``TopK`` chooses is every second position in it."""
        indices = chosen_indices(value)
        return part_with_known_choices(self.model, value, indices) if indices else part_of(self.model, value)

    def is_choice(self, mask: ir.Value) -> bool | Fact:
        """Return whether ``mask`` means causal, not padding, and what an indexer chose, or why it cannot be run."""
        results = self.run(mask)
        if isinstance(results, Fact):
            return results
        return all(
            _is_equal(
                _visible(array),
                instance.visible_keys("causal and padding") & (np.arange(instance.keys) % KEPT_STEP == 0),
            )
            for instance, array in results
        )

    def hides_unseen(self, mask: ir.Value, *, is_shown: bool) -> bool | Fact:
        """Return whether a mask [batch, length, keys] hides what is not causal, and padding, or why it cannot be run.

        Args:
            mask: boolean, or a number that is added to scores.
            is_shown: whether it is true where a score counts.
        """
        results = self.run(mask)
        if isinstance(results, Fact):
            return results
        return all(
            _is_equal(_visible(array) == is_shown, instance.visible_keys("causal and padding")[:, 0])
            and (array.dtype == np.bool_ or not array[_visible(array)].any())
            for instance, array in results
        )

    def meaning(self, mask: ir.Value) -> str | Fact:
        """Return what ``mask`` means, one of :data:`_MEANINGS`, or why it is none of them."""
        if chosen_indices(mask):
            return FROM_ACTIVATIONS()
        results = self.run(mask)
        if isinstance(results, Fact):
            return results
        meanings = list(_MEANINGS)
        if not self._has_padding:
            meanings = [meaning for meaning in meanings if "padding" not in meaning]
        if all(instance.causal.all() for instance, _ in results):
            # Of images and recordings nothing tells an order of keys: what shows all of them shows everything.
            meanings = [meaning for meaning in meanings if "causal" not in meaning]
        for instance, array in results:
            visible = _visible(array)
            if array.dtype != np.bool_ and (array[visible] != 0).any():
                return ADDS_BIAS()
            meanings = [meaning for meaning in meanings if _is_equal(visible, instance.visible_keys(meaning))]
        return meanings[0] if meanings else NOT_CAUSAL()

    def slopes(self, mask: ir.Value, *, is_causal: bool) -> tuple[float, ...] | Fact:
        """Return the slopes of biases that ``mask`` adds, slope (j - p) for the key at j and the query at p (ALiBi).

        Args:
            mask: the mask.
            is_causal: whether ``Attention`` itself hides the keys behind each query.

        Returns:
            One for each head that the mask tells apart, none where it adds nothing, or why biases are others. What is
            the same for all keys of a query changes no softmax.
        """
        results = self.run(mask)
        if isinstance(results, Fact):
            return results
        if not any(_adds(array) for _, array in results):
            return ()
        views: list[tuple[_Instance, npt.NDArray[np.float64], Bools]] = []
        for instance, array in results:
            shape = np.broadcast_shapes(array.shape, instance.causal.shape)
            biases = np.broadcast_to(array, shape).astype(np.float64)
            visible = biases > _HIDDEN_OF_BIASES
            views.append((instance, biases, visible & instance.causal if is_causal else visible))
        single = next((view for view in views if len(view[0].padding) == 1 and view[1].shape[-1] > 1), None)
        slopes = None if single is None else _slopes_of(single[1][0, :, -1], single[2][0, :, -1])
        if slopes is None or not slopes.any():
            return ADDS_BIAS()
        # Padding in front shifts both alike. In between, where these runs have padding too, some count it (MPT), and
        # some do not (Bloom).
        for counts_padding in (True, False):
            if all(
                _are_biases(biases, visible, slopes, instance.positions(counts_padding=counts_padding))
                for instance, biases, visible in views
            ):
                return tuple(slopes.tolist())
        return ADDS_BIAS()

    def window(self, mask: ir.Value, *, is_causal: bool, may_add: bool = False) -> Window | Fact:
        """Return the window of ``mask`` if it means causal and not padding, or why not.

        Args:
            mask: the mask.
            is_causal: whether ``Attention`` itself hides the keys behind each query.
            may_add: whether it may add biases to visible scores, see :meth:`slopes`.
        """
        if chosen_indices(mask):
            return FROM_ACTIVATIONS()
        results = self.run(mask)
        if isinstance(results, Fact):
            return results
        adds = any(_adds(array) for _, array in results)
        if adds and not may_add:
            return ADDS_BIAS()
        views = [
            (instance, visible & instance.causal if is_causal else visible)
            for instance, array in results
            for visible in [_visible(array, _HIDDEN_OF_BIASES if adds else _HIDDEN)]
        ]
        # Of all queries, the last one of the longest single sequence sees the most keys: as many as the window has.
        singles = [(instance, visible) for instance, visible in views if len(instance.padding) == 1]
        longest, visible = max(singles, key=lambda single: single[0].padding.shape[-1], default=(None, None))
        if longest is None or visible is None:
            return NOT_TRIED()
        keys = longest.padding.shape[-1]
        meanings = int(np.broadcast_to(visible, (*visible.shape[:3], keys))[0, 0, -1].sum())
        windows = [Window(0 if meanings == keys else meanings)]
        # The first key that a query sees is the first one of its chunk.
        first_keys = [
            np.broadcast_to(rows, (*rows.shape[:3], instance.padding.shape[-1])).argmax(-1)
            for instance, rows in singles
        ]
        chunk = int(np.gcd.reduce(np.concatenate([first.ravel() for first in first_keys])))
        if chunk:
            windows.append(Window(chunk, is_chunk=True))
        shows = False
        for window in windows:
            pairs = [(instance.in_window(window), instance.padding, rows) for instance, rows in views]
            if all(_is_equal(rows, in_window & padding) for in_window, padding, rows in pairs):
                return window
            shows |= all(_is_equal(rows, in_window) for in_window, _, rows in pairs)
        return SHOWS_PADDING() if shows else NO_WINDOW()

    def without_mask(self) -> Window | Fact:
        """Return the window of causal attention without a mask: none, or why it does not hide padding."""
        return SHOWS_PADDING() if self._has_padding else Window(0)


def _numbers(part: ir.Graph) -> set[int]:
    """Return the constants of ``part`` that could be lengths longer than those that are always tried."""
    lengths: set[int] = set()
    for value in part.initializers.values():
        if value.const_value is not None and value.const_value.size <= 16:
            array = np.asarray(value.const_value.numpy())
            if array.dtype != np.bool_:
                finite = np.abs(array.astype(np.float64)[np.isfinite(array.astype(np.float64))])
                lengths.update(int(number) for number in finite.ravel() if 8 < number < _ENDLESS)
    return lengths


def _instance(call: Call) -> _Instance:
    keys = call.past + call.length
    causal = np.arange(keys)[None, :] <= np.arange(call.length)[:, None] + call.past
    return _Instance(causal[None, None], call.real[:, None, None, :])


def _visible(mask: Array, hidden: float = _HIDDEN) -> Bools:
    return mask.astype(bool) if mask.dtype == np.bool_ else np.asarray(mask, np.float32) > hidden


def _adds(array: Array) -> bool:
    """Return whether a mask changes visible scores."""
    return array.dtype != np.bool_ and bool((array[_visible(array)] != 0).any())


def _slopes_of(biases: npt.NDArray[np.float64], visible: Bools) -> npt.NDArray[np.float64] | None:
    """Return by how much biases [heads, keys] of a query rise from key to key; ``None`` where fewer than two are seen.

    Of neighbours those next to a bias of 0 are rounded least.
    """
    if not (visible[:, :-1] & visible[:, 1:]).any(-1).all():
        return None
    sizes = np.where(
        visible[:, :-1] & visible[:, 1:], np.minimum(np.abs(biases[:, :-1]), np.abs(biases[:, 1:])), np.inf
    )
    nearest_pair = sizes.argmin(-1)[:, None]
    rises: npt.NDArray[np.float64] = np.take_along_axis(np.diff(biases, axis=-1), nearest_pair, -1)[:, 0]
    return rises


def _are_biases(
    biases: npt.NDArray[np.float64],
    visible: Bools,
    slopes: npt.NDArray[np.float64],
    positions: npt.NDArray[np.int64],
) -> bool:
    """Return whether biases [batch, heads, queries, keys] of visible keys rise by slopes [heads] from key to key."""
    offsets = biases - slopes[:, None, None] * positions[:, None, None]
    spread = np.where(visible, offsets, -np.inf).max(-1) - np.where(visible, offsets, np.inf).min(-1)
    largest = np.where(visible, np.abs(biases), 0).max(-1)
    return not (visible.any(-1) & (spread > _ROUNDING * largest)).any()


def _is_equal(meanings: Bools, right: Bools) -> bool:
    try:
        return bool((np.broadcast_to(meanings, np.broadcast_shapes(meanings.shape, right.shape)) == right).all())
    except ValueError:
        return False


def drop_guard(evaluator: MaskEvaluator, node: ir.Node, mask: ir.Value, ledger: Ledger) -> None:
    """Remove ``Where(no visible key, 0, attention)`` behind ``node``, if that is what it is."""
    for user in [use.node for use in node.outputs[0].uses()]:
        if user.op_type != "Where" or user.inputs[2] is not node.outputs[0] or scalar(user.inputs[1]) != 0.0:
            continue
        condition = user.inputs[0]
        assert condition is not None
        blind, masks = evaluator.run(condition), evaluator.run(mask)
        if isinstance(blind, Fact) or isinstance(masks, Fact):
            ledger.skipped(user, GUARD_NOT_RUN())
            continue
        # Both begin with the same instances; the sizes behind them come from constants that only one may have.
        pairs = list(zip(blind, masks, strict=False))[: len(_INSTANCES)]
        means_blind = all(
            _is_equal(mask.astype(bool), ~np.asarray(_visible(views).any(-1, keepdims=True)))
            for (_, mask), (_, views) in pairs
        )
        if not means_blind:
            ledger.skipped(user, NO_GUARD())
            continue
        ledger.changed(node, GUARD_REMOVED(), [user])
        bypass(user, node.outputs[0])
