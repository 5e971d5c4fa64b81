"""What ``run`` and ``eval`` do with an encoder: embeddings of texts, and how close two models' embeddings are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphopt.cli.console import out, print_json, progress
from graphopt.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

    from graphopt.inference.session import OpenModel


def print_embeddings(model: OpenModel, texts: list[str], as_json: bool) -> None:
    """Print the cosines between the embeddings of ``texts``; with ``as_json`` the embeddings too."""
    from graphopt.inference.embeddings import encoder_of
    from graphopt.inference.embeddings.evaluate import cosine_matrix
    from graphopt.report.console_table import ConsoleTable, figure_columns

    vectors = encoder_of(model).embed(texts)
    cosines = cosine_matrix(vectors)
    if as_json:
        rows = zip(texts, vectors.tolist(), cosines.tolist(), strict=True)
        return print_json([{"text": text, "embedding": vector, "cosines": row} for text, vector, row in rows])
    table = ConsoleTable(["", "text", *figure_columns(*map(str, range(1, len(texts) + 1)))])
    for number, (text, row) in enumerate(zip(texts, cosines, strict=True), start=1):
        table.add_row(str(number), text, *(f"{cosine:.4f}" for cosine in row))
    out.print(table)
    out.print(f"cosines of embeddings of {vectors.shape[1]} numbers; --json prints the embeddings")
    return None


def print_closeness(model: OpenModel, reference: Path | None, text: str, threads: int, as_json: bool) -> None:
    """Print the cosines of the embeddings of lines of ``text`` with those of ``reference``.

    Raises:
        InputError: there is no reference, or see :func:`graphopt.inference.embeddings.evaluate.evaluate_embeddings`.
    """
    from graphopt.inference.embeddings import encoder_of, load_encoder
    from graphopt.inference.embeddings.evaluate import evaluate_embeddings
    from graphopt.report.console_table import ConsoleTable, figure_columns

    if reference is None:
        raise InputError(
            "an encoder is compared with another one, and no reference was given",
            file=model.file,
            remedy="graphopt eval FOLDER --reference FLOAT_EXPORT --text FILE",
        )
    with progress() as say:
        result = evaluate_embeddings(
            encoder_of(model),
            load_encoder(reference, threads=threads),
            text,
            on_progress=lambda texts, total: say("embedding", texts, total),
        )
    if as_json:
        return print_json(result)
    table = ConsoleTable(
        figure_columns("texts", "tokens", "cut", "mean cosine", "1% at or below", "smallest", "seconds")
    )
    table.add_row(
        f"{result.texts:,}",
        f"{result.tokens:,}",
        f"{result.cut:,}",
        f"{result.cosine_mean:.6f}",
        f"{result.cosine_1_percent:.6f}",
        f"{result.cosine_smallest:.6f}",
        f"{result.seconds:.1f}",
    )
    out.print(table)
    return None
