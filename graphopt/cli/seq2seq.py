"""What ``run`` and ``eval`` do with an encoder-decoder: texts of texts, and of recordings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphopt.cli.classes import print_table
from graphopt.cli.console import print_completions, print_json, print_stream
from graphopt.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from graphopt.inference.decoding.continuation import Settings
    from graphopt.inference.seq2seq import Seq2SeqSession
    from graphopt.inference.session import OpenModel


def print_texts(
    session: Seq2SeqSession,
    texts: Sequence[str],
    recordings: Sequence[Path],
    settings: Settings,
    *,
    language: str | None,
    as_json: bool,
) -> None:
    """Print the text that a model makes of each text or recording, streaming where there is one.

    Args:
        session: the model.
        texts: texts to read.
        recordings: WAV files to write down.
        settings: how tokens are chosen, and when a text ends.
        language: of the sources, where the model knows several.
        as_json: whether to print JSON.

    Raises:
        InputError: there is none; or see :meth:`Seq2SeqSession.encode` and
            :func:`graphopt.inference.recordings.features_of_files`.
    """
    from graphopt.inference.seq2seq import complete, steps

    names: list[str] = [str(file) for file in recordings] if session.reads_recordings else list(texts)
    if session.reads_recordings and texts:
        remedy = "leave out --prompt"
        raise InputError("the model reads recordings, and no texts", file=session.encoder.file, remedy=remedy)
    if recordings and not session.reads_recordings:
        raise InputError("the model reads texts", file=session.encoder.file, remedy="leave out --audio")
    if not names:
        option = "--audio FILE" if session.reads_recordings else "--prompt TEXT"
        raise InputError("there is no source", remedy=f"give {option}")
    if session.reads_recordings:
        from graphopt.inference.recordings import features_of_files

        source = session.source_of_recordings(features_of_files(session.decoder.file.parent, recordings))
    else:
        source = session.source_of_texts(*session.encode(texts))
    if not as_json and len(names) == 1:
        return print_stream(steps(session, source, settings, language))
    completions = complete(session, source, settings, language)
    return print_completions("source", names, completions, as_json=as_json)


def print_text_agreement(model: OpenModel, reference: Path | None, text: str, threads: int, as_json: bool) -> None:
    """Print how close the logits of texts behind sources are to those of ``reference``.

    Raises:
        InputError: there is no reference, or see :func:`graphopt.quality.seq2seq.text_agreement`.
    """
    from graphopt.inference.seq2seq import load_seq2seq, seq2seq_of
    from graphopt.quality.seq2seq import text_agreement

    if reference is None:
        raise InputError(
            "an encoder-decoder is compared with another one, and no reference was given",
            file=model.file,
            remedy="graphopt eval FOLDER --reference FLOAT_EXPORT --text FILE",
        )
    lines = list(dict.fromkeys(line.strip() for line in text.splitlines() if line.strip()))
    figures = text_agreement(seq2seq_of(model, threads=threads), load_seq2seq(reference, threads=threads), lines)
    return print_json(figures) if as_json else print_table([figures], tuple(figures))
