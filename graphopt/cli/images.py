"""What ``run`` does with a vision-language model and images: the text behind each prompt about them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphopt.cli.console import print_completions, print_stream
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
        return print_stream(steps(session, prompts, settings))
    completions = complete(session, prompts, settings)
    return print_completions("prompt_text", texts, completions, as_json=as_json)
