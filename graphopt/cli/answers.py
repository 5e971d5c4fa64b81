"""What ``run`` and ``eval`` do with a model that answers questions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphopt.cli.classes import print_table
from graphopt.cli.console import print_json
from graphopt.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

    from graphopt.inference.session import OpenModel


def print_answers(model: OpenModel, texts: list[str], as_json: bool) -> None:
    """Print the answer to each of ``texts``: a question, a tab, and what it is about.

    Raises:
        InputError: a text has no tab; or see :func:`graphopt.inference.answers.answers`.
    """
    from graphopt.inference.answers import answers, question_answerer_of

    questions = []
    for text in texts:
        question, tab, context = text.partition("\t")
        if not tab:
            raise InputError(
                f"the prompt {question!r} has no tab between a question and the text that it is about",
                remedy=r"--prompt $'who?\tAda wrote it'",
            )
        questions.append((question, context))
    rows = [
        {"question": question, "answer": answer.text, "probability": answer.probability}
        | {"begin": answer.begin, "end": answer.end}
        for (question, _), answer in zip(questions, answers(question_answerer_of(model), questions), strict=True)
    ]
    return print_json(rows) if as_json else print_table(rows, ("question", "answer", "probability"))


def print_answer_agreement(model: OpenModel, reference: Path | None, text: str, threads: int, as_json: bool) -> None:
    """Print how often the answers about lines of ``text`` are those of ``reference``.

    Raises:
        InputError: there is no reference, or see :func:`graphopt.quality.answers.answer_agreement`.
    """
    from graphopt.inference.answers import question_answerer_of
    from graphopt.inference.session import open_folder
    from graphopt.quality.answers import answer_agreement

    if reference is None:
        raise InputError(
            "a model that answers questions is compared with another one, and no reference was given",
            file=model.file,
            remedy="graphopt eval FOLDER --reference FLOAT_EXPORT --text FILE",
        )
    lines = list(dict.fromkeys(line.strip() for line in text.splitlines() if line.strip()))
    reference_session = question_answerer_of(open_folder(reference, threads=threads))
    figures = answer_agreement(question_answerer_of(model), reference_session, lines)
    return print_json(figures) if as_json else print_table([figures], tuple(figures))
