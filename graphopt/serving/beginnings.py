"""Beginnings of prompts that workers read before they answer: the texts of files of ``graphopt cache make``.

The Engine owns the blocks of its pool and takes no keys and values from outside. So the states in a file are of no use
to it, and its text is read once by each worker; requests that begin with it share those blocks then, as long as the
pool has room for them.
"""

from __future__ import annotations

import queue
from typing import TYPE_CHECKING

from graphopt.artifact.tokens import TOKENIZER, read_tokenizer
from graphopt.errors import InputError
from graphopt.inference.prompt_cache import shared_length
from graphopt.inference.states.state_file import StateFile
from graphopt.serving.request import Limits, tokens_of
from graphopt.serving.stream import Event, Turn

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from graphopt.serving.batch import Batch


BEGINNINGS = "beginnings.json"
"""The file in which workers find the tokens of all beginnings."""


def beginnings_of(folder: Path, files: Sequence[Path]) -> list[list[int]]:
    """Return the tokens of files of ``graphopt cache make``, of whatever precision of the model they were made with.

    Args:
        folder: an artifact with the graph of the step ``serve``.
        files: of prompts.

    Raises:
        InputError: a file cannot be read or holds no prompt, the folder's tokenizer makes other tokens of its text, it
            leaves no position for a reply, or all of them together fill the pool.
    """
    limits, blocks = Limits.of_folder(folder), 0
    beginnings: list[list[int]] = []
    for file in files:
        prompt = StateFile.load(file).prompt
        if prompt is None:
            raise InputError("the cache holds no prompt", file=file, remedy="make it by `graphopt cache make`")
        tokenizer = read_tokenizer(folder / TOKENIZER)
        tokens = (
            [] if tokenizer is None else tokenizer.encode(prompt.text, add_special_tokens=prompt.system is None).ids
        )
        # the last token of a system prompt may be another one where a message stands behind it
        if shared_length(tokens, prompt.tokens) < len(prompt.tokens) - 1:
            raise InputError(
                f"the tokenizer of {folder} makes other tokens of this prompt",
                file=file,
                remedy="make it with an artifact of the same model",
            )
        try:
            beginnings.append(list(tokens_of({"token_ids": prompt.tokens}, limits)))
        except ValueError as error:
            raise InputError(str(error), file=file, remedy="keep a shorter prompt") from error
        blocks += -(-len(beginnings[-1]) // limits.block)
    if blocks >= limits.blocks:
        raise InputError(
            f"the prompts take {blocks} blocks of {limits.block} tokens, and the pool has {limits.blocks}",
            file=folder,
            remedy="give the pool more memory (the option memory of the step serve), or keep fewer prompts",
        )
    return beginnings


def read_first(batch: Batch, beginnings: Sequence[Sequence[int]]) -> None:
    """Let the Engine read beginnings, and keep their blocks for requests to come.

    Raises:
        InputError: the Engine refuses one.
    """
    for tokens in beginnings:
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        batch.begin(Turn(tuple(tokens), 1), events.put)
        while (event := events.get()).finish is None:
            pass
        if event.finish == "error":
            raise InputError(f"a prompt of {len(tokens)} tokens cannot be read: {event.message}")
