"""Text from a model: prompts in, tokens out, one step at a time for the whole batch.

Prompts of different length share a batch by padding on the left, so that the last column is every row's newest token.
There is one loop, :func:`run`: completions, conversations, grammars and drafts go through it.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from pydantic import BaseModel, ConfigDict

from graphopt.errors import InputError
from graphopt.inference.decoding.continuation import Continuation, Settings, StepOutput, StopReason, start
from graphopt.inference.decoding.decoder import Decoder, Logits
from graphopt.inference.decoding.draft_verification import Columns, Verdict
from graphopt.inference.decoding.logprobs import TokenLogprob
from graphopt.inference.decoding.sampling import GREEDY, Sampling
from graphopt.inference.decoding.speculation import Drafting, Speculation

if TYPE_CHECKING:
    from graphopt.inference.decoding.grammar import Grammar
    from graphopt.inference.decoding.proposers import Proposer
    from graphopt.inference.prefix_cache import PrefixCache
    from graphopt.inference.prompt_cache import PromptCache
    from graphopt.inference.session import Session
    from graphopt.inference.states.eviction import Eviction
    from graphopt.tasks.ports import IntArray

Prompt = str | Sequence[int]

_AHEAD = 512
"""New tokens that a cache in pages reserves room for in advance, at most: a text may end before."""


class Completion(BaseModel):
    """The completion of one prompt.

    Attributes:
        prompt: the tokens of the prompt.
        tokens: the new tokens, without the token that ended the text.
        text: the text of the new tokens up to a stop string, such that prompt and text can be joined; ``None`` without
            a tokenizer.
        stopped: why there are no more: the model ended the text, or the grammar allows no more; a stop string was
            found; ``max_new_tokens`` is reached; the model has no position left; or the caller interrupted it.
        logprobs: of each new token, where they were asked for.
    """

    model_config = ConfigDict(frozen=True)

    prompt: list[int]
    tokens: list[int]
    text: str | None
    stopped: StopReason
    logprobs: list[TokenLogprob] | None = None

    @classmethod
    def from_row(cls, row: Continuation) -> Completion:
        """Return what a row has become."""
        return cls(
            prompt=row.prompt,
            tokens=row.tokens,
            text=None if row.session.tokenizer is None else row.text,
            stopped=row.stop_reason or "interrupted",
            logprobs=None if row.settings.logprobs is None else row.logprobs,
        )


@dataclass(frozen=True)
class Step:
    """One more token of each row.

    Attributes:
        tokens: the new token, or ``None`` where the row has ended, now or before, or where it waits: a run of the model
            that checks drafts gives some rows more tokens than others.
        texts: the text that the token completes; characters whose last bytes are still missing are held back, and so is
            what may become a stop string.
        stopped: why the row has ended, or ``None`` while it continues.
        logprobs: of the new token, or ``None`` where there is none or it was not asked for.
    """

    tokens: tuple[int | None, ...]
    texts: tuple[str, ...]
    stopped: tuple[StopReason | None, ...]
    logprobs: tuple[TokenLogprob | None, ...]


def generate(
    session: Session,
    prompts: str | Sequence[Prompt],
    *,
    max_new_tokens: int = 64,
    sampling: Sampling = GREEDY,
    stop: Sequence[str] = (),
    grammar: Grammar | None = None,
    logprobs: int | None = None,
    proposer: Proposer | Speculation | None = None,
    cache: PromptCache | PrefixCache | None = None,
    eviction: Eviction | None = None,
) -> list[Completion]:
    """Complete each prompt; see :func:`stream` for the arguments and errors."""
    settings = Settings(max_new_tokens, sampling, tuple(stop), grammar, logprobs)
    return complete(session, prompts, settings, proposer, cache, eviction)


def stream(
    session: Session,
    prompts: str | Sequence[Prompt],
    *,
    max_new_tokens: int = 64,
    sampling: Sampling = GREEDY,
    stop: Sequence[str] = (),
    grammar: Grammar | None = None,
    logprobs: int | None = None,
    proposer: Proposer | Speculation | None = None,
    cache: PromptCache | PrefixCache | None = None,
    eviction: Eviction | None = None,
) -> Iterator[Step]:
    """Complete the prompts step by step; arguments are checked at once, the model runs as the steps are consumed.

    Args:
        session: the model.
        prompts: texts, or lists of tokens; a text gets the BOS token that its tokenizer adds, a list is used as it is.
        max_new_tokens: tokens to make for each prompt, at most.
        sampling: how tokens are chosen.
        stop: strings that end a text, which ends before the first of them.
        grammar: the form that each text must have; needs ``graphopt[chat]``.
        logprobs: how many of the most likely tokens to list beside each chosen one, with their log probabilities.
        proposer: what guesses tokens that are checked several at a time; the text stays the same. A
            :class:`graphopt.inference.decoding.speculation.Speculation` also says how long drafts are, and counts.
        cache: a beginning that the model has read already, or one for the beginnings of all prompts that were run with
            it: what prompts share with it is not fed again.
        eviction: how many tokens states keep behind the prompts, and which; goes with neither a proposer nor a cache.

    Raises:
        InputError: a prompt is empty, longer than the model's positions or holds an unknown token; ``max_new_tokens``
            is below 1 or ``logprobs`` below 0; there is a text, a stop string or a grammar but no tokenizer; the
            grammar cannot be used; prompts differ in length and the graph has no ``attention_mask``; the model cannot
            check drafts, or the proposer is not made for it.
        MissingDependencyError: there is a grammar, and llguidance is not installed.
    """
    settings = Settings(max_new_tokens, sampling, tuple(stop), grammar, logprobs)
    return steps(session, prompts, settings, proposer, cache, eviction)


def complete(
    session: Session,
    prompts: str | Sequence[Prompt],
    settings: Settings,
    proposer: Proposer | Speculation | None = None,
    cache: PromptCache | PrefixCache | None = None,
    eviction: Eviction | None = None,
) -> list[Completion]:
    """Complete each prompt, as :func:`generate` does."""
    rows = _rows(session, prompts, settings)
    for _ in _generate(session, rows, proposer, cache, eviction):
        pass
    return [Completion.from_row(row) for row in rows]


def steps(
    session: Session,
    prompts: str | Sequence[Prompt],
    settings: Settings,
    proposer: Proposer | Speculation | None = None,
    cache: PromptCache | PrefixCache | None = None,
    eviction: Eviction | None = None,
) -> Iterator[Step]:
    """Complete the prompts step by step, as :func:`stream` does."""
    return _generate(session, _rows(session, prompts, settings), proposer, cache, eviction)


def run(
    decoder: Decoder,
    rows: Sequence[Continuation],
    ids: IntArray,
    mask: IntArray | None = None,
    is_halted: Callable[[], bool] = lambda: False,
    drafts: Drafting | None = None,
    eviction: Eviction | None = None,
) -> Generator[Step, None, None]:
    """Continue rows until all of them have ended.

    Args:
        decoder: what feeds the model; its cache may hold the beginnings of the rows.
        rows: the texts, by row of the batch.
        ids: the tokens of the rows that are not fed yet, [batch, length].
        mask: which of them are tokens, as for :meth:`Decoder.step`.
        is_halted: asked after each run of the model, a part of a long prompt included; where it says yes, all rows end
            where they are, and the decoder tells what it was fed.
        drafts: guesses at the tokens behind the prompt. Whenever the caller stops, the decoder's cache holds what it
            would without them.
        eviction: how many tokens the states keep behind the prompt, and which; not beside drafts.
    """
    columns = Columns(ids, mask, [()] * len(rows))
    is_prompt = True
    decoder.on_hidden = None
    if drafts is not None:
        drafts.watch(decoder)
    while True:
        # One token a row is never taken back.
        before = None if drafts is None or columns.ids.shape[1] == 1 or is_prompt else decoder.mark()
        begin = time.perf_counter()
        logits = _feed(decoder, columns, is_halted)
        seconds = time.perf_counter() - begin
        verdict, lengths = Verdict.for_rows(rows), [len(row.tokens) for row in rows]
        try:
            if logits is None:
                yield _step(rows, [row.interrupt() for row in rows])
            else:
                for outputs in verdict.check(rows, columns.drafts, logits, decoder.hidden):
                    yield _step(rows, outputs)
        finally:
            if drafts is not None and not is_prompt:
                if before is not None:
                    drafts.settle(verdict, decoder, before)
                drafts.learn(verdict, columns.ids.shape[1], seconds)
        if all(row.stop_reason is not None for row in rows):
            return
        if eviction is not None and (is_prompt or (decoder.tokens > eviction.keep + eviction.slack).any()):
            decoder.evict(eviction)
        new = [row.tokens[length:] for row, length in zip(rows, lengths, strict=True)]
        columns = _plain_columns(rows, new) if drafts is None else drafts.next(new, decoder)
        is_prompt = False


def _feed(decoder: Decoder, columns: Columns, is_halted: Callable[[], bool]) -> Logits | None:
    """Feed columns piece by piece, and return the logits that are sampled from; ``None`` where the caller halted it."""
    newest: Logits = np.empty((0, 0, 0), np.float32)
    for _, logits in decoder.feed(columns.ids, columns.mask):
        newest = logits[:, -columns.sample_count :]
        if is_halted():
            return None
    return newest


def _plain_columns(rows: Sequence[Continuation], new: Sequence[Sequence[int]]) -> Columns:
    """Return the columns of the new tokens of each row, without drafts.

    A row that has ended stays in the batch; its mask of 0 takes no position and hides the tokens fed for it.
    """
    texts = [tokens if row.stop_reason is None else () for row, tokens in zip(rows, new, strict=True)]
    return Columns.from_rows(texts, [()] * len(rows))


def _step(rows: Sequence[Continuation], outputs: Sequence[StepOutput]) -> Step:
    return Step(
        tuple(output.token for output in outputs),
        tuple(output.text for output in outputs),
        tuple(row.stop_reason for row in rows),
        tuple(output.logprob for output in outputs),
    )


def room_for(rows: Sequence[Continuation]) -> int:
    """Return for how many tokens a row a cache should reserve room at once."""
    return max(len(row.prompt) + min(row.limit, _AHEAD) for row in rows)


def _rows(session: Session, prompts: str | Sequence[Prompt], settings: Settings) -> list[Continuation]:
    rows: list[Continuation] = []
    occurrences: Counter[tuple[int, ...]] = Counter()
    for number, prompt in enumerate([prompts] if isinstance(prompts, str) else prompts, start=1):
        if len(prompt) == 0:
            raise InputError(f"prompt {number} is empty", remedy="give it a text or at least one token")
        ids = session.encode(prompt) if isinstance(prompt, str) else [int(token) for token in prompt]
        key = tuple(ids)
        rows.append(start(session, ids, settings, name=f"prompt {number}", occurrence=occurrences[key]))
        occurrences[key] += 1
    if not rows:
        raise InputError("there is no prompt", remedy="give at least one")
    if len({len(row.prompt) for row in rows}) > 1 and not session.interface.takes_padding:
        raise InputError(
            session.interface.why_no_padding,
            file=session.file,
            remedy="run the prompts one by one, or export the model with a mask",
        )
    return rows


def _generate(
    session: Session,
    rows: Sequence[Continuation],
    proposer: Proposer | Speculation | None,
    cache: PromptCache | PrefixCache | None,
    eviction: Eviction | None,
) -> Iterator[Step]:
    if eviction is not None and (proposer is not None or cache is not None):
        raise InputError(
            "tokens that are evicted cannot come back, as drafts and caches of prompts ask",
            remedy="leave the proposer and the cache out, or eviction",
        )
    drafts = None if proposer is None else as_speculation(proposer).start(session, rows)
    prompts = [row.prompt for row in rows]
    decoder, prefix = (Decoder(session, len(rows), room=room_for(rows)), 0) if cache is None else cache.fork(prompts)
    ids, mask = _padded_left([prompt[prefix:] for prompt in prompts])
    return _remember(run(decoder, rows, ids, mask, drafts=drafts, eviction=eviction), decoder, rows, cache)


def _remember(
    steps: Generator[Step, None, None],
    decoder: Decoder,
    rows: Sequence[Continuation],
    cache: PromptCache | PrefixCache | None,
) -> Iterator[Step]:
    """Yield steps, and give the states behind the prompts, and behind the last step, to a cache that takes them.

    After an error it is not known what the states hold, and they are dropped.
    """
    if cache is None or len(rows) > 1:
        yield from steps
        return
    (row,) = rows
    with contextlib.suppress(GeneratorExit), contextlib.closing(steps):
        for step in steps:
            if decoder.tokens[0] == len(row.prompt):
                decoder.keep()
            yield step
    cache.add([*row.prompt, *row.tokens], decoder)


def as_speculation(proposer: Proposer | Speculation) -> Speculation:
    """Return how a proposer is used: as costs and success tell, unless it comes with more."""
    return proposer if isinstance(proposer, Speculation) else Speculation(proposer)


def _padded_left(prompts: Sequence[Sequence[int]]) -> tuple[IntArray, IntArray]:
    """Return tokens and mask [batch, longest], each prompt at the right end of its row."""
    longest = max(map(len, prompts))
    ids, mask = np.zeros((2, len(prompts), longest), np.int64)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = prompt
        mask[row, longest - len(prompt) :] = 1
    return ids, mask
