"""What ``run`` does with a vision-language model and images: the text behind each prompt about them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from graphopt.cli.console import out, print_json
from graphopt.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from graphopt.inference.decoding.continuation import Settings
    from graphopt.inference.images import VisionLanguageSession


def print_image_texts(
    session: VisionLanguageSession,
    texts: Sequence[str],
    files: Sequence[Path],
    settings: Settings,
    *,
    as_json: bool,
) -> None:
    """Print the text that a model writes behind each prompt about images, streaming where there is one prompt.

    Args:
        session: the model.
        texts: prompts; each is about all images.
        files: images.
        settings: how tokens are chosen, and when a text ends.
        as_json: whether to print JSON.

    Raises:
        InputError: there is no prompt; or see :meth:`graphopt.inference.images.VisionLanguageSession.prompt`.
    """
    from graphopt.inference.images import complete, steps
    from graphopt.inference.signals import read_image

    if not texts:
        raise InputError("there is no prompt about the images", remedy="give --prompt TEXT")
    images = [read_image(file) for file in files]
    prompts = [session.prompt(text, images) for text in texts]
    if not as_json and len(prompts) == 1:
        for step in steps(session, prompts, settings):
            sys.stdout.write(step.texts[0])
            sys.stdout.flush()
        sys.stdout.write("\n")
        return None
    completions = complete(session, prompts, settings)
    rows: list[dict[str, Any]] = [
        {"prompt_text": text, **completion.model_dump()} for text, completion in zip(texts, completions, strict=True)
    ]
    if as_json:
        return print_json(rows)
    for row in rows:
        out.rule(f"{row['prompt_text']} ({row['stopped']})")
        out.print(row["text"] or "", markup=False, highlight=False)
    return None
