"""The text that every compile is judged on: what ships with the Python that runs, so nothing is downloaded.

English and source code in equal parts: reference pages of the language, and modules that no training or calibration of
graphopt reads.
"""

from __future__ import annotations

import importlib

from graphopt.util.stdlib_text import held_out_text


def documentation() -> str:
    """Return reference pages of the Python language, in English, as ``help()`` shows them.

    Raises:
        FileNotFoundError: this Python was installed without them.
    """
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise FileNotFoundError("this Python has no pydoc_data.topics; give a text with --text FILE") from error
    return "\n\n".join(topics[name].strip() for name in sorted(topics))


def held_out_texts() -> list[str]:
    """Return the texts, English first.

    Raises:
        FileNotFoundError: this Python was installed without one of them.
    """
    return [documentation(), held_out_text()]
