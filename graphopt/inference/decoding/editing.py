"""Edits of a text that was read: the tokens of a span are replaced, and what stands behind it is not read again.

    read:      a b c | d e | f g h          before the span: as it is
    wanted:    a b c | x   | f g h          the span: read, as always
                                            behind it: moved, keys turn to their new positions

After positional integrity encoding (PIE, He et al. 2024, arXiv 2407.03157). Tokens that moved still know what they had
read before, as in any cache that is put together of parts; the first behind a span, which read most of it, can be read
again.
"""

from __future__ import annotations

from difflib import SequenceMatcher
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from graphopt.errors import InputError
from graphopt.inference.decoding.batch_rows import CountedRows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphopt.inference.decoding.decoder import Decoder

REREAD = 32
"""Tokens behind a span that are read again, by default."""


class Edit(NamedTuple):
    """A span of a text that other tokens replace.

    Attributes:
        start: its first token.
        end: behind its last token; ``start`` where tokens are only inserted.
        tokens: those that replace it; none where it is deleted.
    """

    start: int
    end: int
    tokens: Sequence[int]


def edits_between(before: Sequence[int], after: Sequence[int], reread: int = REREAD) -> list[Edit]:
    """Return the edits that make one text of another.

    Args:
        before: tokens.
        after: tokens.
        reread: tokens behind a span that are read again: shorter stretches between two spans become part of them.
    """
    matcher = SequenceMatcher(None, before, after)
    edits: list[Edit] = []
    for tag, start, end, first, last in matcher.get_opcodes():
        if tag == "equal":
            continue
        if edits and start - edits[-1].end <= reread:
            previous = edits.pop()
            stretch = before[previous.end : start]
            edits.append(Edit(previous.start, end, [*previous.tokens, *stretch, *after[first:last]]))
        else:
            edits.append(Edit(start, end, list(after[first:last])))
    return edits


def apply_edits(tokens: Sequence[int], edits: Sequence[Edit]) -> list[int]:
    """Return a text after its edits.

    Raises:
        InputError: an edit does not lie in the text, or edits overlap or are not in order.
    """
    result, position = list[int](), 0
    for start, end, new_tokens in edits:
        if not position <= start <= end <= len(tokens):
            raise InputError(
                f"an edit of tokens {start} to {end} of {len(tokens)}, behind one that ends at {position}",
                remedy="give edits that lie in the text, in order",
            )
        result += [*tokens[position:start], *new_tokens]
        position = end
    return [*result, *tokens[position:]]


def edit_row(decoder: Decoder, tokens: Sequence[int], edits: Sequence[Edit], reread: int) -> Decoder:
    """Return a decoder of one row that has read ``tokens`` with ``edits``; see :meth:`Decoder.edit`.

    Raises:
        InputError: as there.
    """
    session, count = decoder.session, len(tokens)
    check_row(decoder, count)
    session.check_length(len(apply_edits(tokens, edits)))
    if not edits:
        return decoder
    row = decoder.fork([0])
    bounds = [*(edit.start for edit in edits[1:]), count]
    for index, ((start, end, new_tokens), bound) in enumerate(zip(edits, bounds, strict=True)):
        if index == 0:
            row.rewind(start)
        read_end = min(end + reread, bound)
        read_tokens = [*new_tokens, *tokens[end:read_end]]
        if read_tokens:
            for _ in row.feed(np.array([read_tokens], np.int64)):
                pass
        if read_end < bound:
            row.take_tokens(decoder, read_end, bound)
    return row


def check_row(decoder: Decoder, count: int) -> None:
    """Refuse states that cannot be row.

    Raises:
        InputError: there are several rows, or rows of another length, or tokens that do not know their positions.
    """
    session = decoder.session
    if session.interface.recurrent:
        raise InputError(
            "recurrent states are made of all tokens so far, so a span of them cannot be replaced",
            file=session.file,
            tensor=session.interface.recurrent[0],
            remedy="read the text again",
        )
    if "edit" not in decoder.states.abilities:
        raise InputError(
            "caches that grow are not edited", file=session.file, remedy="add the step page_kv to the recipe"
        )
    if decoder.tokens.tolist() != [count]:
        raise InputError(
            f"rows of {decoder.tokens.tolist()} tokens, and a text of {count}",
            remedy="edit one row, and give all tokens that it has read",
        )
    rows = decoder.rows
    if isinstance(rows, CountedRows) and rows.evicted_tokens.any():
        raise InputError("tokens were evicted, and nothing says which", remedy="read the text again")
