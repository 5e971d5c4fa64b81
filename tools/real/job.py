"""The main job on a real model: export, dither, every recipe, and what each artifact is worth."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import graphopt
from graphopt.embeddings import load_encoder
from graphopt.embeddings.evaluate import evaluate_embeddings
from graphopt.errors import GraphoptError
from graphopt.evaluation import evaluate
from graphopt.manifest import Manifest, read_manifest
from graphopt.session import Session
from tools.real.dither import dither

QUESTION = "What is the capital of France?"
SENTENCES = (
    "A man is playing a guitar.",
    "Someone plays an instrument.",
    "The stock market fell sharply today.",
)
REPLY_TOKENS = 32
WINDOW = 512
Say = Callable[[str], None]


@dataclass(frozen=True)
class Row:
    """What one artifact of a model is worth.

    Attributes:
        model: the model's short name.
        recipe: what was done to it.
        error: what went wrong; all figures are absent then.
        seconds: time to make the artifact, ``None`` where it was there already.
        bytes: of all its files.
        bits_per_weight: scales included.
        bits_per_byte: of a causal language model: its loss per byte of the text.
        perplexity: per token.
        tokens_per_second: tokens of the reply in a second, prompt included.
        reply: what it answers to :data:`QUESTION`.
        cosine_mean: of an encoder: between its embeddings of the text's lines and those of the export.
        cosine_smallest: the smallest of these.
        between: cosines of the first of :data:`SENTENCES` with the others.
    """

    model: str
    recipe: str
    error: str | None = None
    seconds: float | None = None
    bytes: int | None = None
    bits_per_weight: float | None = None
    bits_per_byte: float | None = None
    perplexity: float | None = None
    tokens_per_second: float | None = None
    reply: str | None = None
    cosine_mean: float | None = None
    cosine_smallest: float | None = None
    between: tuple[float, ...] = ()


def run(name: str, checkpoint: Path, folder: Path, recipes: Sequence[str], text: str, say: Say) -> list[Row]:
    """Do the main job on one model below ``folder``, and return a row for the export and one for each recipe.

    What an earlier run exported is taken as it is; recipes are applied anew. A ``.gguf`` checkpoint is dithered before
    anything is measured.

    Args:
        name: the model's short name.
        checkpoint: a ``.gguf`` file or a Hugging Face folder.
        folder: where artifacts go.
        recipes: presets.
        text: what models are scored on.
        say: called with what is being done.
    """
    exported, seconds = folder / f"{name}-float32", None
    if not exported.exists():
        say(f"{name}: exporting")
        began = time.perf_counter()
        graphopt.export(checkpoint, exported)
        seconds = time.perf_counter() - began
    start = exported
    if checkpoint.suffix == ".gguf":
        start = folder / f"{name}-dithered"
        if not start.exists():
            say(f"{name}: dithering")
            dither(exported, checkpoint, start)
    rows = [_measured(name, "float32", start, start, seconds, text, say)]
    for recipe in recipes:
        say(f"{name}: {recipe}")
        made, began = folder / f"{name}-{recipe}", time.perf_counter()
        try:
            graphopt.optimize(start, recipe, made, overwrite=True)
        except GraphoptError as error:
            rows.append(Row(name, recipe, error=str(error)))
            continue
        rows.append(_measured(name, recipe, made, start, time.perf_counter() - began, text, say))
    return rows


def _measured(name: str, recipe: str, folder: Path, start: Path, seconds: float | None, text: str, say: Say) -> Row:
    say(f"{name}: {recipe}, measuring")
    manifest = read_manifest(folder)
    row = _encoder if manifest.task == "encoder" else _causal_lm
    try:
        return row(name, recipe, folder, start, seconds, text, manifest)
    except GraphoptError as error:
        return Row(name, recipe, error=str(error), seconds=seconds)


def _causal_lm(
    name: str, recipe: str, folder: Path, start: Path, seconds: float | None, text: str, manifest: Manifest
) -> Row:
    session = graphopt.load(folder)
    score = evaluate(session, text, window=WINDOW)
    began = time.perf_counter()
    reply = answer(session, QUESTION)
    spent = time.perf_counter() - began
    return Row(
        name,
        recipe,
        seconds=seconds,
        bytes=_size(folder),
        bits_per_weight=None if manifest.weights is None else manifest.weights.bits_per_weight,
        bits_per_byte=score.bits_per_byte,
        perplexity=score.perplexity,
        tokens_per_second=reply[1] / spent,
        reply=reply[0],
    )


def answer(session: Session, question: str) -> tuple[str, int]:
    """Return what a chat model says to a question, greedily, and in how many tokens; its template is the folder's."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(session.file.parent))
    turns = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    (completion,) = graphopt.generate(session, str(prompt), max_new_tokens=REPLY_TOKENS)
    return completion.text or "", len(completion.tokens)


def _encoder(
    name: str, recipe: str, folder: Path, start: Path, seconds: float | None, text: str, manifest: Manifest
) -> Row:
    from graphopt.embeddings.evaluate import cosine_matrix

    session, reference = load_encoder(folder), load_encoder(start)
    closeness = evaluate_embeddings(session, reference, text)
    between = cosine_matrix(session.embed(SENTENCES))[0, 1:]
    return Row(
        name,
        recipe,
        seconds=seconds,
        bytes=_size(folder),
        bits_per_weight=None if manifest.weights is None else manifest.weights.bits_per_weight,
        cosine_mean=closeness.cosine_mean,
        cosine_smallest=closeness.cosine_smallest,
        between=tuple(map(float, between)),
    )


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
