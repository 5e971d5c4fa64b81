"""Tokenizers, and texts as the windows of tokens that statistics are collected on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Tokenizer

from graphopt.errors import InputError, MissingTokenizerError
from graphopt.util.stdlib_text import training_texts

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from graphopt.quantization.statistics.options import CalibrationOptions
    from graphopt.tasks.ports import IntArray

TOKENIZER = "tokenizer.json"

DEFAULT_WINDOW = 256
"""Tokens of a window by default, where the model has as many positions."""


def read_tokenizer(file: Path) -> Tokenizer | None:
    """Read a ``tokenizer.json``, ignoring its settings of truncation and padding; ``None`` where the file is missing.

    Raises:
        InputError: it is not one.
    """
    if not file.is_file():
        return None
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise InputError(f"the tokenizer cannot be read: {error}", file=file) from error
    # Some files keep the settings of training, which would silently truncate long texts and pad short ones.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def tokenizer_among(companions: Mapping[str, Path]) -> Tokenizer:
    """Return the tokenizer of a model, by the files that lie beside it.

    Raises:
        MissingTokenizerError: there is none.
    """
    file = companions.get(TOKENIZER)
    tokenizer = None if file is None else read_tokenizer(file)
    if tokenizer is None:
        raise MissingTokenizerError(
            f"the model has no {TOKENIZER}",
            remedy="put the one that it was trained with beside it; to quantize without text, take a recipe that "
            "rounds to nearest, such as int4-rtn",
        )
    return tokenizer


def beginning_of(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens that a tokenizer puts before every text."""
    encoding = tokenizer.encode("a")
    body = (*encoding.special_tokens_mask, 0).index(0)
    return tuple(encoding.ids[:body])


def texts_of(companions: Mapping[str, Path], options: CalibrationOptions, positions: int | None) -> list[IntArray]:
    """Return the tokens that statistics are collected on, int64 [length] for each window.

    Args:
        companions: the files beside the model, its tokenizer among them.
        options: which text, and how much of it.
        positions: how many the model has; ``None`` where that is not known.

    Raises:
        InputError: there is no tokenizer, the text cannot be read or has no token, or the window is too wide.
    """
    tokenizer = tokenizer_among(companions)
    window = options.window or min(positions or DEFAULT_WINDOW, DEFAULT_WINDOW)
    if positions is not None and window > positions:
        raise InputError(
            f"a window of {window} tokens is wider than the model's {positions} positions",
            remedy="choose a smaller window for the calibration",
        )
    if options.text is None:
        return windows_of_files(tokenizer, training_texts(), window, options.windows)
    try:
        text = options.text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"the text to calibrate on cannot be read: {error}", file=options.text) from error
    return windows_of_text(tokenizer, text, window, options.windows)


def windows_of_text(tokenizer: Tokenizer, text: str, window: int, windows: int) -> list[IntArray]:
    """Return windows of a text, spaced evenly over it; fewer where it is short, but at least one.

    Each begins as the tokenizer begins a text.

    Args:
        tokenizer: of the model.
        text: the text.
        window: tokens of a window, at most.
        windows: how many, at most.

    Raises:
        InputError: the text has no token.
    """
    first = beginning_of(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    if not ids:
        raise InputError("the text to calibrate on is empty", remedy="give a longer text")
    size = max(1, min(window - len(first), len(ids)))
    starts = np.unique(np.linspace(0, len(ids) - size, max(1, min(windows, len(ids) // size))).astype(np.int64))
    return [np.array([*first, *ids[start : start + size]], np.int64) for start in starts]


def windows_of_files(tokenizer: Tokenizer, files: Mapping[str, str], window: int, windows: int) -> list[IntArray]:
    """Return a window from each of some of ``files``, chosen evenly; files that are too short are passed over.

    The part of a file that is read begins at a line somewhere in its first half, the same one each time.

    Args:
        tokenizer: of the model.
        files: texts by name.
        window: tokens of a window.
        windows: how many, at most.
    """
    first, names = beginning_of(tokenizer), sorted(files)
    token_windows: list[IntArray] = []
    # Each window is taken from the first file that is long enough, from an even place in the list on.
    for number in range(windows):
        begin = number * len(names) // windows
        for name in names[begin : max(begin + 1, (number + 1) * len(names) // windows)]:
            text = files[name]
            start = text.find("\n", len(text) // 2 * (number % 8) // 8) + 1
            ids = tokenizer.encode(text[start : start + 16 * window], add_special_tokens=False).ids
            if len(ids) >= window - len(first):
                token_windows.append(np.array([*first, *ids[: window - len(first)]], np.int64))
                break
    return token_windows
