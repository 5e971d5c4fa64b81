"""Before and after: what a pass did to what the model computes.

Two locks. An exact pass that claims what it did is checked by :mod:`graphopt.checks.certificate`, at any size of model.
And where the model fits, it is run:

A model runs on a probe of random tokens: a batch with padding, a prefill, then a second call on the cache. The logits
of real tokens are compared with those from before the pass, or of the last token of each call where the graph makes no
others. An exact pass may move them by rounding only and is refused otherwise; a lossy pass is measured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx_ir.external_data import unload_from_model

from graphopt.analysis.contrib import contrib_nodes
from graphopt.analysis.interface import Interface
from graphopt.errors import InputError, VerificationError
from graphopt.facts import Check, Effect, Fact, Rule
from graphopt.memory import available_memory
from graphopt.passes.base import Pass
from graphopt.rotations.claims import Claims
from graphopt.runtime import open_session, run
from graphopt.weights import map_on_demand

TOLERANCE = 1e-4
"""How far an exact pass may move the logits, relative to the largest: float32 rounding of tens of layers, with room."""

_BATCH, _LENGTH, _PREFILL, _PADDING = 2, 12, 8, 3
# Columns of context that are fed at once: their logits are made and thrown away.
_PIECE = 64
LONGEST_CONTEXT = 4096
"""Tokens of context at most: a pass that shows only later is measured as far as that."""
_LEVEL, _FLOAT32 = "accuracy_level", 1
# Below this many bytes a tensor stays inside the .onnx file: onnxruntime wants shape constants there.
_INLINE = 256

RAN = Rule(
    "logits.ran",
    "{batch} x {length} random tokens{behind} with padding, in two calls, run before and after in onnxruntime",
)
BEHIND = Rule("logits.behind-context", " behind {tokens} of context")
NOT_ASKED = Rule("logits.not-asked", "the caller asked not to run the model")
NOT_STARTED = Rule("logits.not-started", "the model was not run before the pass")
NO_MEMORY = Rule(
    "logits.no-memory", "running the model needs about {needed_gb:.1f} GB of memory, {free_gb:.1f} GB are free"
)
CERTIFIED = Rule(
    "certificate.holds",
    "each of {nodes} nodes maps coordinates to coordinates, the outputs are in their own; {weights} fused weights are "
    "their originals times orthogonal maps up to rounding, tried with {vectors} random vectors each",
)


@dataclass(frozen=True)
class Probe:
    """Random tokens [batch, length] and their mask; the first row begins with padding where the graph has a mask.

    Attributes:
        input_ids: the tokens.
        attention_mask: 1 for a token, 0 for padding.
        context: columns that only fill the cache; what the model says about them is not compared.
    """

    input_ids: npt.NDArray[np.int64]
    attention_mask: npt.NDArray[np.int64]
    context: int = 0

    @classmethod
    def of(cls, interface: Interface, seed: int = 0, context: int = 0) -> Probe:
        """Draw a probe that fits ``interface``; without a cache there is no context."""
        context = context if interface.past else 0
        ids = np.random.default_rng(seed).integers(0, interface.vocabulary or 2, (_BATCH, context + _LENGTH))
        mask = np.ones(ids.shape, np.int64)
        if interface.takes_padding:
            mask[0, :_PADDING] = 0
        return cls(ids, mask, context)

    @property
    def compared(self) -> npt.NDArray[np.bool_]:
        """[batch, 12]: which of the columns behind the context are tokens."""
        return self.attention_mask[:, self.context :].astype(bool)

    @property
    def calls(self) -> list[tuple[int, int, bool]]:
        """First column and the one behind the last of each call, and whether its logits are compared."""
        begins = range(0, self.context, _PIECE)
        filling = [(begin, min(begin + _PIECE, self.context), False) for begin in begins]
        middle, end = self.context + _PREFILL, self.context + _LENGTH
        return [*filling, (self.context, middle, True), (middle, end, True)]

    def last_of_calls(self, logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return those of the logits of real tokens that end a call."""
        ends = np.zeros(self.compared.shape, bool)
        ends[:, [_PREFILL - 1, _LENGTH - 1]] = True
        chosen: npt.NDArray[np.float64] = logits[ends[self.compared]]
        return chosen


class Verifier:
    """Runs a model before and after each pass, and remembers what it said last.

    Args:
        folder: where models are written to be run; weights that a pass made lazily are computed once, into it.
        entries: onnxruntime session entries to run with.
        run: whether to run models at all.
        native: whether graphopt's own kernels take the nodes of its operators, where they were built. Without them the
            bodies run that the model carries, which is what onnxruntime runs anywhere else.
        context: tokens that fill the cache before anything is compared, see
            :attr:`graphopt.passes.base.Pass.context_tokens`.

    Attributes:
        why_not: why the model cannot be run here, once :meth:`start` has found a reason.
    """

    def __init__(
        self, folder: Path, entries: Mapping[str, str], *, run: bool = True, native: bool = True, context: int = 0
    ) -> None:
        self._context = context
        self._folder, self._entries, self._may_run, self._native = folder, dict(entries), run, native
        self._probe: Probe | None = None
        self._logits: npt.NDArray[np.float64] | None = None
        self._first: npt.NDArray[np.float64] | None = None
        self._saved: Path | None = None
        self.why_not: Fact | None = None

    def start(self, model: ir.Model) -> None:
        """Run the model as it came in.

        Raises:
            InputError: onnxruntime cannot load it, or cannot run it.
            VerificationError: it computes NaN or infinity to begin with.
        """
        self.why_not = _why_not(model) if self._may_run else NOT_ASKED()
        if self.why_not is not None:
            return
        try:
            self._first = self._logits = self._run(model)
        except InputError:
            raise
        except Exception as error:  # whatever onnxruntime raises where an operator refuses what it is given
            raise InputError(f"onnxruntime cannot run the model as it came in: {error}") from error
        if not np.isfinite(self._first).all():
            raise VerificationError("the model computes NaN or infinite logits before any pass", tensor="logits")

    def check(self, model: ir.Model, name: str, effect: Effect) -> Check:
        """Run the model after the pass called ``name`` and compare.

        Raises:
            VerificationError: an exact pass moved the logits, or any pass made them NaN or infinite.
        """
        if self.why_not is not None or self._logits is None or self._first is None:
            return Check(name="logits", after=name, status="not covered", reason=self.why_not or NOT_STARTED())
        after, probe = self._run(model), self._probe_for(model)
        if len(after) < len(self._logits):
            self._first, self._logits = probe.last_of_calls(self._first), probe.last_of_calls(self._logits)
        before = self._logits
        if not np.isfinite(after).all():
            raise VerificationError("the logits are NaN or infinite after a pass", node=name, tensor="logits")
        figures = {
            "largest_change": _relative(before, after),
            "largest_change_from_start": _relative(self._first, after),
            "divergence_from_start_nats": _divergence(self._first, after),
            "same_first_choice_share": float((self._first.argmax(-1) == after.argmax(-1)).mean()),
        }
        change = figures["largest_change"]
        if effect == "exact" and not change <= TOLERANCE:
            raise VerificationError(
                f"the pass {name} is exact, but it moved the logits by {change:.1e} of the largest "
                f"(allowed: {TOLERANCE:.0e}); nothing was written",
                tensor="logits",
                remedy="leave the pass out of the recipe, and report this with the model",
            )
        self._logits = after
        reason = RAN(batch=_BATCH, length=_LENGTH, behind=BEHIND(tokens=probe.context) if probe.context else None)
        return Check(name="logits", after=name, status="measured", reason=reason, figures=figures)

    def _run(self, model: ir.Model) -> npt.NDArray[np.float64]:
        with _float32_inputs(model):
            path = self.settle(model)
        return run_probe(path, self._probe_for(model), self._entries, native=self._native)

    def _probe_for(self, model: ir.Model) -> Probe:
        if self._probe is None:
            self._probe = Probe.of(Interface.of_graph(model.graph), context=self._context)
        return self._probe

    def settle(self, model: ir.Model) -> Path:
        """Write the model into the folder, let its weights point there, and return the ``.onnx`` file."""
        number = 0 if self._saved is None else int(self._saved.stem) + 1
        data, path = f"{number}.data", self._folder / f"{number}.onnx"
        unload_from_model(model, self._folder, data, size_threshold_bytes=_INLINE)
        map_on_demand(model)
        # What is too small for the file may be made of what the file before has.
        for value in (value for graph in model.graphs() for value in graph.initializers.values()):
            if isinstance(value.const_value, ir.LazyTensor):
                lazy = value.const_value
                value.const_value = ir.Tensor(lazy.numpy(), dtype=lazy.dtype, shape=lazy.shape, name=lazy.name)
        ir.save(model, path)
        if self._saved is not None:
            self._saved.unlink()
            self._saved.with_suffix(".data").unlink(missing_ok=True)
        self._saved = path
        return path


@contextlib.contextmanager
def _float32_inputs(model: ir.Model) -> Iterator[None]:
    """Let ``MatMulNBits`` leave its inputs alone meanwhile.

    Rounding them to int8 turns a difference in the last place into one of 1/127, and what a rewrite did is lost in it.
    """
    nodes = [node for node in contrib_nodes(model.graph, "MatMulNBits") if _LEVEL in node.attributes]
    levels = [node.attributes[_LEVEL] for node in nodes]
    for node in nodes:
        node.attributes[_LEVEL] = ir.AttrInt64(_LEVEL, _FLOAT32)
    try:
        yield
    finally:
        for node, level in zip(nodes, levels, strict=True):
            node.attributes[_LEVEL] = level


def prove(before: ir.Model, after: ir.Model, claims: Claims, name: str) -> Check:
    """Let the independent checker confirm what the pass called ``name`` claims to have made of ``before``.

    Raises:
        VerificationError: it does not; names the first node and tensor at fault.
    """
    from graphopt.checks.certificate.checker import check as certify

    certificate = certify(before, after, claims)
    if certificate.status == "failed":
        first = next(finding for finding in certificate.findings if finding.status == "failed")
        raise VerificationError(
            f"the certificate of {name} does not hold: {first.reason}",
            node=first.node,
            tensor=first.tensor,
            remedy="do not deploy this model; leave the pass out of the recipe, and report this with the model",
        )
    figures = {
        "rotations": certificate.rotations,
        "nodes": certificate.nodes,
        "fused_weights": certificate.weights,
        "unchanged_constants": certificate.unchanged,
        "largest_share_of_rounding": certificate.largest_error_ratio,
        "seconds": certificate.seconds,
    }
    reason = CERTIFIED(nodes=certificate.nodes, weights=certificate.weights, vectors=certificate.vectors)
    return Check(
        name="certificate",
        after=name,
        status=certificate.status,
        reason=reason,
        figures=figures,
        findings=certificate.findings,
    )


def run_probe(path: Path, probe: Probe, entries: Mapping[str, str], *, native: bool = True) -> npt.NDArray[np.float64]:
    """Return the logits of real tokens, float64 [tokens, vocabulary]: of a prefill, then of the rest on its cache.

    A graph that makes logits of the last position only gives those of two tokens a row.
    """
    session = open_session(path, entries=entries, native=native)
    interface = Interface.of_session(session)
    # What cannot have padding may take several new tokens onto a cache in one row only (GroupQueryAttention).
    rows = [slice(None)] if interface.pads else [slice(row, row + 1) for row in range(_BATCH)]
    made = np.concatenate([_run_rows(session, interface, probe, each) for each in rows])
    taken: npt.NDArray[np.float64] = made[probe.compared] if made.shape[1] == _LENGTH else made
    return taken.reshape(-1, made.shape[-1]).astype(np.float64)


def _run_rows(session: Any, interface: Interface, probe: Probe, rows: slice) -> npt.NDArray[Any]:
    """Return the logits [batch, columns, vocabulary] of some rows of ``probe``."""
    ids, mask = probe.input_ids[rows], probe.attention_mask[rows]
    past, found = interface.empty_past(len(ids), ids.shape[1]), []
    for start, end, compared in probe.calls:
        feeds = interface.feeds(ids[:, start:end], mask[:, :end], past)
        logits, *present = run(session, ["logits", *interface.present], feeds)
        past = dict(zip(interface.past, present, strict=True))
        if compared:
            found.append(logits)
    return np.concatenate(found, axis=1)


def context_of(passes: Sequence[Pass[Any]], max_positions: int | None) -> int:
    """Return how many tokens of context show what ``passes`` do, as far as the model has positions for them."""
    most = LONGEST_CONTEXT if max_positions is None else max(0, min(LONGEST_CONTEXT, max_positions - _LENGTH))
    return min(most, max((step.context_tokens for step in passes), default=0))


def _why_not(model: ir.Model) -> Fact | None:
    need = 2 * sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value is not None)
    free = available_memory()
    if need > free:
        return NO_MEMORY(needed_gb=need / 1e9, free_gb=free / 1e9)
    return None


def _relative(before: npt.NDArray[np.float64], after: npt.NDArray[np.float64]) -> float:
    return float(np.abs(after - before).max() / np.abs(before).max())


def _divergence(before: npt.NDArray[np.float64], after: npt.NDArray[np.float64]) -> float:
    """Return the mean Kullback-Leibler divergence per token, in nats."""
    p, q = (x - x.max(-1, keepdims=True) for x in (before, after))
    p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (p, q))
    return float((np.exp(p) * (p - q)).sum(-1).mean())
