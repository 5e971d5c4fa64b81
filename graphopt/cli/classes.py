"""What ``run`` and ``eval`` do with a classifier or a reranker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graphopt.cli.console import out, print_json
from graphopt.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from graphopt.inference.classes import ClassifierSession, Text
    from graphopt.inference.session import OpenModel


def print_classes(model: OpenModel, texts: list[str], as_json: bool) -> None:
    """Print the classes of ``texts``; of a reranker the documents behind the first text, the best first.

    A tab in a text parts a pair, such as premise and hypothesis.

    Raises:
        InputError: see :meth:`graphopt.inference.classes.ClassifierSession.encode`.
    """
    from graphopt.inference.classes import classifier_of

    session = classifier_of(model)
    columns: tuple[str, ...]
    if session.has_token_classes:
        rows, columns = _token_rows(session, texts), ("text", "token", "class", "probability")
    elif session.class_count == 1:
        rows, columns = _score_rows(session, texts), ("document", "score", "probability")
    else:
        rows, columns = _class_rows(session, texts), ("text", "class", "probability")
    if as_json:
        return print_json(rows)
    return print_table(rows, columns)


def print_table(rows: Sequence[Mapping[str, Any]], columns: tuple[str, ...]) -> None:
    """Print ``columns`` of ``rows``, floats with four digits."""
    from graphopt.report.console_table import ConsoleTable

    table = ConsoleTable(list(columns))
    for row in rows:
        cells = (row[column] for column in columns)
        table.add_row(*(f"{cell:.4f}" if isinstance(cell, float) else str(cell) for cell in cells))
    out.print(table)


def _pair(text: str) -> Text:
    first, tab, second = text.partition("\t")
    return (first, second) if tab else text


def _class_rows(session: ClassifierSession, texts: list[str]) -> list[dict[str, Any]]:
    """Return the likeliest class of each text; where classes do not exclude one another, all of half and more."""
    labels, rows = session.labels, []
    for text, logits in zip(texts, session.logits(session.encode([_pair(text) for text in texts])), strict=True):
        shares = session.probabilities(logits)
        numbers = [int(shares.argmax())]
        if session.has_independent_classes:
            numbers = [number for number in range(len(labels)) if shares[number] >= 0.5] or numbers
        rows.append(
            {
                "text": text,
                "class": ", ".join(labels[number] for number in numbers),
                "probability": float(shares[numbers].max()),
                "probabilities": dict(zip(labels, shares.tolist(), strict=True)),
                "logits": logits.tolist(),
            }
        )
    return rows


def _score_rows(session: ClassifierSession, texts: list[str]) -> list[dict[str, Any]]:
    """Return the score of each document for the query, the first text; of a single text its own."""
    pairs: list[Text] = [_pair(text) for text in texts]
    if len(texts) > 1 and not any("\t" in text for text in texts):
        pairs = [(texts[0], document) for document in texts[1:]]
    rows: list[dict[str, Any]] = []
    for number, (pair, logits) in enumerate(zip(pairs, session.logits(session.encode(pairs)), strict=True)):
        query, document = (None, pair) if isinstance(pair, str) else pair
        rows.append(
            {
                "document": document,
                "score": float(logits[0]),
                "probability": float(session.probabilities(logits)[0]),
                "query": query,
                "index": number,
            }
        )
    return sorted(rows, key=lambda row: -float(row["score"]))


def _token_rows(session: ClassifierSession, texts: list[str]) -> list[dict[str, Any]]:
    """Return the likeliest class of each token that is not a special one."""
    labels, rows = session.labels, []
    encodings = session.encode(texts)
    for text, encoding, logits in zip(texts, encodings, session.logits(encodings), strict=True):
        shares = session.probabilities(logits)
        for token, is_special, (begin, end), row in zip(
            encoding.tokens, encoding.special_tokens_mask, encoding.offsets, shares, strict=True
        ):
            if not is_special:
                best = int(row.argmax())
                rows.append(
                    {
                        "text": text,
                        "token": token,
                        "class": labels[best],
                        "probability": float(row[best]),
                        "begin": begin,
                        "end": end,
                    }
                )
    return rows


def print_class_agreement(model: OpenModel, reference: Path | None, text: str, threads: int, as_json: bool) -> None:
    """Print how often the classes (the rankings) of lines of ``text`` are those of ``reference``.

    Raises:
        InputError: there is no reference, or see :func:`graphopt.quality.classes.class_agreement`.
    """
    from graphopt.inference.classes import classifier_of, load_classifier
    from graphopt.quality.classes import class_agreement

    if reference is None:
        raise InputError(
            "a classifier is compared with another one, and no reference was given",
            file=model.file,
            remedy="graphopt eval FOLDER --reference FLOAT_EXPORT --text FILE",
        )
    lines = list(dict.fromkeys(line.strip() for line in text.splitlines() if line.strip()))
    figures = class_agreement(classifier_of(model), load_classifier(reference, threads=threads), lines)
    if as_json:
        return print_json(figures)
    return print_table([figures], tuple(figures))
