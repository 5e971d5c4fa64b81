"""Drafts of heads that read the model's own last hidden state (Medusa, Cai et al., 2024, arXiv:2401.10774).

    h             -> lm_head -> t        the model's own choice: the newest token of the text
    h, t -> head 1 -> lm_head -> g1      one token later
    h, t -> head 2 -> lm_head -> g2      two tokens later, and so on

All guesses of a draft come of one state and one token, so that they cost one product with the lm_head for a few rows. A
guess does not know those before it; that is what it pays for being cheap. It is the most likely token, of a row that
draws too: of the shipped heads 0.30 of those are right at temperature 0.8, and 0.26 of tokens drawn with the row's own
numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from graphopt.analysis.structure.lm_head import lm_head_of
from graphopt.analysis.structure.ports import HIDDEN, LOGITS
from graphopt.artifact.artifact import HEADS
from graphopt.errors import InputError
from graphopt.graph.diagnostics import Fact
from graphopt.inference.decoding.proposer import Guess, Proposer
from graphopt.inference.decoding.proposers.heads_file import TOKEN, Floats, HeadsFile, ports
from graphopt.ort.session import open_session, run

if TYPE_CHECKING:
    from collections.abc import Sequence

    import onnxruntime

    from graphopt.inference.decoding.continuation import Continuation
    from graphopt.inference.session import Session
    from graphopt.tasks.ports import Array

_MIN_CHANCE = 0.1
"""Chance below which a draft ends: what follows is hardly ever right."""

_ROWS = 256
"""Rows of the unit matrix that the lm_head is asked for at once."""


class Heads(Proposer):
    """Proposes by heads.

    Args:
        session: the model whose states they read; it gives them (the step ``expose_hidden``).
        heads: the heads, by default those of ``heads.onnx`` beside the model.
        min_chance: a draft ends with the first token that its head thinks less likely than this.

    Attributes:
        count: how many heads there are.

    Raises:
        InputError: the graph gives no hidden states or shares its lm_head with something else, there are no heads, or
            they are for another width, another vocabulary or another model.
    """

    name = "heads"
    usage = "heads"
    summary = "heads.onnx beside the model, which read its last hidden state"

    def __init__(self, session: Session, heads: HeadsFile | None = None, *, min_chance: float = _MIN_CHANCE) -> None:
        if not session.interface.gives_hidden:
            raise InputError(
                "this model does not give its last hidden state, which heads read",
                file=session.file,
                tensor=HIDDEN,
                remedy="optimize it with --add expose_hidden",
            )
        file = session.file.with_name(HEADS)
        heads = HeadsFile.load(file) if heads is None else heads
        _check_fits(session, heads)
        self._session, self._min_chance = session, min_chance
        heads = heads.in_basis_of(lm_head_matrix(session), file) if len(heads.tokens) else heads
        self.count = heads.count
        self._inference = _open_model(session, _model_with_heads(session, heads))
        self._rows: Sequence[Continuation] = []

    @classmethod
    def open(cls, session: Session, options: str) -> Heads:  # noqa: ARG003, it has none
        """See :class:`Proposer`."""
        return cls(session)

    def begin(self, rows: Sequence[Continuation]) -> None:
        """See :class:`Proposer`.

        Raises:
            InputError: the rows are another model's.
        """
        if rows and rows[0].session.file != self._session.file:
            raise InputError(
                f"these heads read the states of {self._session.file.parent}, and another model writes the text",
                file=rows[0].session.file.parent,
                remedy="make heads for it",
            )
        self._rows = rows

    def commit(self, row: int, tokens: Sequence[int]) -> None:
        """See :class:`Proposer`; the state that a row keeps is all that heads read."""

    def propose(self, prefixes: Sequence[Sequence[int]], limits: Sequence[int]) -> list[list[Guess]]:
        """See :class:`Proposer`. Guesses of another proposer take the places of the first heads."""
        drafts: list[list[Guess]] = [[] for _ in limits]
        heads = [
            range(len(prefix), min(self.count, len(prefix) + limit))
            for prefix, limit in zip(prefixes, limits, strict=True)
        ]
        inputs = [
            (number, row.hidden, row.tokens[-1])
            for number, row in enumerate(self._rows)
            if row.hidden is not None and row.tokens and heads[number]
        ]
        if not inputs:
            return drafts
        numbers, states, tokens = zip(*inputs, strict=True)
        for number, logits in zip(numbers, self.logits(np.stack(states), tokens), strict=True):
            drafts[number] = self._guesses(logits[list(heads[number])])
        return drafts

    def _guesses(self, logits: np.ndarray) -> list[Guess]:
        """Return the most likely token of each head, logits [heads, vocabulary], up to the first unlikely one."""
        guesses = []
        for values in logits:
            token = int(values.argmax())
            values = values.astype(np.float32, copy=False)
            guesses.append(Guess(token, float(1 / np.exp(values - values[token]).sum()), self.name))
            if guesses[-1].chance < self._min_chance:
                break
        return guesses

    def logits(self, states: np.ndarray, tokens: Sequence[int]) -> np.ndarray:
        """Return what heads say of hidden states [number, width] and the tokens that were chosen by them.

        Returns:
            Logits [number, heads, vocabulary].
        """
        newest = np.array(tokens, np.int64)[:, None]
        feeds: dict[str, Array] = {HIDDEN: states[:, None].astype(np.float32, copy=False), TOKEN: newest}
        logits: np.ndarray = run(self._inference, [LOGITS], feeds)[0]
        return logits


def lm_head_matrix(session: Session) -> Floats:
    """Return the matrix of the model's lm_head as its kernel reads it, float32 [width, vocabulary].

    The product is run on the rows of the unit matrix, so that it does not matter how its weight is stored.

    Raises:
        InputError: no single product makes the logits.
    """
    model, width = _model_of_lm_head(session), _width(session)
    inference = _open_model(session, model)
    unit, product = np.eye(width, dtype=np.float32), str(model.graph.outputs[0].name)
    pieces = [
        run(inference, [product], {HIDDEN: unit[None, begin : begin + _ROWS]})[0][0] for begin in range(0, width, _ROWS)
    ]
    return np.concatenate(pieces).astype(np.float32)


def _model_with_heads(session: Session, heads: HeadsFile) -> ir.Model:
    """Return what of the model lies behind the hidden state, up to the logits, with heads in front.

    Its inputs are the hidden state, float32 [batch, 1, width], and the newest token [batch, 1].
    """
    model, lm_head = _load_lm_head(session)
    state, token = ports(_width(session))
    _feed_lm_head(model.graph, lm_head, heads.blocks(model.graph, state, token))
    logits = next(value for value in model.graph.outputs if value.name == LOGITS)
    return _cut(model, [state, token], logits)


def _model_of_lm_head(session: Session) -> ir.Model:
    """Return the product of the lm_head alone; its input is the hidden state, float32 [batch, positions, width]."""
    model, lm_head = _load_lm_head(session)
    state, _ = ports(_width(session))
    state.shape = ir.Shape(["batch", "positions", _width(session)])
    _feed_lm_head(model.graph, lm_head, state)
    return _cut(model, [state], lm_head.outputs[0])


def _load_lm_head(session: Session) -> tuple[ir.Model, ir.Node]:
    """Return the model and the product that makes its logits.

    Raises:
        InputError: no single product does.
    """
    model = ir.load(session.file)
    lm_head = lm_head_of(model.graph)
    if isinstance(lm_head, Fact):
        raise InputError(f"heads need the model's lm_head: {lm_head}", file=session.file, tensor=LOGITS)
    return model, lm_head


def _feed_lm_head(graph: ir.Graph, lm_head: ir.Node, states: ir.Value) -> None:
    """Let the lm_head read ``states`` in the place of the hidden state, in its type."""
    old = lm_head.inputs[0]
    assert old is not None and old.dtype is not None
    old.name = f"{HIDDEN}.of_text"
    if old.dtype != ir.DataType.FLOAT:
        narrow = ir.node("Cast", [states], {"to": old.dtype.value}, name="heads.narrow")
        graph.append(narrow)
        states = narrow.outputs[0]
        states.name, states.dtype, states.shape = "heads.narrow", old.dtype, None
    lm_head.replace_input_with(0, states)


def _cut(model: ir.Model, inputs: Sequence[ir.Value], output: ir.Value) -> ir.Model:
    """Return the part of the model between inputs and an output, whose positions are no longer those of a text."""
    graph = model.graph
    graph.inputs.clear()
    graph.inputs.extend(inputs)
    graph.outputs.clear()
    graph.outputs.append(output)
    RemoveUnusedNodesPass()(model)
    graph.sort()
    for node in graph:
        for value in node.outputs:
            value.shape = None
    return model


def _open_model(session: Session, model: ir.Model) -> onnxruntime.InferenceSession:
    """Open a graph made of the model's, on one thread: a second pool of threads would wait beside the model's."""
    return open_session(
        session.file,
        entries=session.manifest.session,
        threads=1,
        native=session.native,
        device=session.device,
        content=ir.to_proto(model).SerializeToString(),
    )


def _width(session: Session) -> int:
    width = session.interface.outputs[HIDDEN].shape[-1]
    if width is None:
        raise InputError("the graph does not say how wide its hidden state is", file=session.file, tensor=HIDDEN)
    return width


def _check_fits(session: Session, heads: HeadsFile) -> None:
    for name, port, size, model_size in (
        ("a hidden state", HIDDEN, heads.width, _width(session)),
        ("a vocabulary", LOGITS, heads.vocabulary, session.interface.vocabulary),
    ):
        if size != model_size:
            raise InputError(
                f"the heads are for {name} of {size}, and this model has one of {model_size}",
                file=session.file.with_name(HEADS),
                tensor=port,
                remedy="train heads for this model with tools/train/heads.py",
            )
