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
from graphopt.inference.decoding.drafts.drafter import Guess
from graphopt.inference.decoding.drafts.heads_file import TOKEN, Floats, HeadsFile, ports
from graphopt.ort.session import open_session, run

if TYPE_CHECKING:
    from collections.abc import Sequence

    import onnxruntime

    from graphopt.inference.decoding.continuation import Continuation
    from graphopt.inference.session import Session
    from graphopt.tasks.ports import Array

SOURCE = "heads"

_LEAST = 0.1
"""Chance below which a draft ends: what follows is hardly ever right."""

_ROWS = 256
"""Rows of the unit matrix that the lm_head is asked for at once."""


class Heads:
    """Drafts by heads.

    Args:
        session: the model whose states they read; it gives them (the step ``expose_hidden``).
        heads: the heads, by default those of ``heads.onnx`` beside the model.
        least: a draft ends with the first token that its head thinks less likely than this.

    Attributes:
        count: how many heads there are.

    Raises:
        InputError: the graph gives no hidden states or shares its lm_head with something else, there are no heads, or
            they are for another width, another vocabulary or another model.
    """

    def __init__(self, session: Session, heads: HeadsFile | None = None, *, least: float = _LEAST) -> None:
        if not session.interface.gives_hidden:
            raise InputError(
                "this model does not give its last hidden state, which heads read",
                file=session.file,
                tensor=HIDDEN,
                remedy="optimize it with --add expose_hidden",
            )
        file = session.file.with_name(HEADS)
        heads = HeadsFile.read(file) if heads is None else heads
        _check_fits(session, heads)
        self._session, self._least = session, least
        heads = heads.turned(lm_head_matrix(session), file) if len(heads.tokens) else heads
        self.count = heads.count
        self._inference = _opened(session, _behind_hidden(session, heads))
        self._rows: Sequence[Continuation] = []

    def begin(self, rows: Sequence[Continuation]) -> None:
        """See :class:`Drafter`.

        Raises:
            InputError: the rows are another model's.
        """
        if rows and rows[0].session.file != self._session.file:
            raise InputError(
                f"these heads read the states of {self._session.file.parent}, and another model writes the text",
                file=rows[0].session.file.parent,
                remedy="make a drafter for it",
            )
        self._rows = rows

    def commit(self, row: int, tokens: Sequence[int]) -> None:
        """See :class:`Drafter`; the state that a row keeps is all that heads read."""

    def propose(self, begun: Sequence[Sequence[int]], limits: Sequence[int]) -> list[list[Guess]]:
        """See :class:`Drafter`. Guesses of another drafter take the places of the first heads."""
        drafts: list[list[Guess]] = [[] for _ in limits]
        places = [
            range(len(first), min(self.count, len(first) + limit)) for first, limit in zip(begun, limits, strict=True)
        ]
        states, tokens, asked = [], [], []
        for number, row in enumerate(self._rows):
            if row.hidden is not None and row.tokens and places[number]:
                states.append(row.hidden)
                tokens.append(row.tokens[-1])
                asked.append(number)
        if not asked:
            return drafts
        for number, logits in zip(asked, self.logits(np.stack(states), tokens), strict=True):
            for place in places[number]:
                guess = _guess(logits[place])
                drafts[number].append(guess)
                if guess.chance < self._least:
                    break
        return drafts

    def logits(self, states: np.ndarray, tokens: Sequence[int]) -> np.ndarray:
        """Return what heads say of hidden states [number, width] and the tokens that were chosen by them.

        Returns:
            Logits [number, heads, vocabulary].
        """
        newest = np.array(tokens, np.int64)[:, None]
        feeds: dict[str, Array] = {HIDDEN: states[:, None].astype(np.float32, copy=False), TOKEN: newest}
        made: np.ndarray = run(self._inference, [LOGITS], feeds)[0]
        return made


def _guess(logits: np.ndarray) -> Guess:
    token = int(logits.argmax())
    values = logits.astype(np.float32, copy=False)
    chance = float(1 / np.exp(values - values[token]).sum())
    return Guess(token, chance, SOURCE)


def lm_head_matrix(session: Session) -> Floats:
    """Return the matrix of the model's lm_head as its kernel reads it, float32 [width, vocabulary].

    The product is run on the rows of the unit matrix, so that it does not matter how its weight is stored.

    Raises:
        InputError: no single product makes the logits.
    """
    model = _behind_hidden(session, None)
    inference, width = _opened(session, model), _width(session)
    unit, product = np.eye(width, dtype=np.float32), str(model.graph.outputs[0].name)
    pieces = [
        run(inference, [product], {HIDDEN: unit[None, begin : begin + _ROWS]})[0][0] for begin in range(0, width, _ROWS)
    ]
    return np.concatenate(pieces).astype(np.float32)


def _behind_hidden(session: Session, heads: HeadsFile | None) -> ir.Model:
    """Return what of the model lies behind the hidden state: with heads in front up to the logits, without the product.

    Its input is the hidden state, float32 [batch, positions, width]; with heads one position, and its token.
    """
    model = ir.load(session.file)
    graph = model.graph
    lm_head = lm_head_of(graph)
    if isinstance(lm_head, Fact):
        raise InputError(f"heads need the model's lm_head: {lm_head}", file=session.file, tensor=LOGITS)
    old = lm_head.inputs[0]
    assert old is not None and old.dtype is not None
    old.name = f"{HIDDEN}.of_text"
    given, token = ports(_width(session))
    if heads is None:
        given.shape = ir.Shape(["batch", "positions", _width(session)])
    states = given if heads is None else heads.blocks(graph, given, token)
    if old.dtype != ir.DataType.FLOAT:
        narrow = ir.node("Cast", [states], {"to": old.dtype.value}, name="heads.narrow")
        graph.append(narrow)
        states = narrow.outputs[0]
        states.name, states.dtype, states.shape = "heads.narrow", old.dtype, None
    lm_head.replace_input_with(0, states)
    result = lm_head.outputs[0] if heads is None else next(each for each in graph.outputs if each.name == LOGITS)
    graph.inputs.clear()
    graph.inputs.extend([given] if heads is None else [given, token])
    graph.outputs.clear()
    graph.outputs.append(result)
    RemoveUnusedNodesPass()(model)
    graph.sort()
    for node in graph:  # positions were those of a text
        for value in node.outputs:
            value.shape = None
    return model


def _opened(session: Session, model: ir.Model) -> onnxruntime.InferenceSession:
    """Open a graph made of the model's, on one thread: a second pool of threads would wait beside the model's."""
    return open_session(
        session.file,
        entries=session.manifest.session,
        threads=1,
        native=session.native,
        device=session.device,
        changed=ir.to_proto(model).SerializeToString(),
    )


def _width(session: Session) -> int:
    width = session.interface.outputs[HIDDEN].shape[-1]
    if width is None:
        raise InputError("the graph does not say how wide its hidden state is", file=session.file, tensor=HIDDEN)
    return width


def _check_fits(session: Session, heads: HeadsFile) -> None:
    for what, theirs, ours in (
        ("a hidden state", heads.width, _width(session)),
        ("a vocabulary", heads.vocabulary, session.interface.vocabulary),
    ):
        if theirs != ours:
            raise InputError(
                f"the heads are for {what} of {theirs}, and this model has one of {ours}",
                file=session.file.with_name(HEADS),
                tensor=HIDDEN if what == "a hidden state" else LOGITS,
                remedy="train heads for this model with tools/train/heads.py",
            )
