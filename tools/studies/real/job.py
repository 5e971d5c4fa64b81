"""The main job on a real model: export, dither, compile by every recipe, and measure each artifact."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import graphopt
from graphopt.artifact import artifact as artifacts
from graphopt.artifact.manifest import read_manifest
from graphopt.errors import GraphoptError
from graphopt.inference.embeddings import load_encoder
from graphopt.inference.embeddings.evaluate import cosine_matrix
from graphopt.inference.session import Session
from graphopt.ort.session import open_session
from graphopt.passes.codes.keep_codes import KeepCodes
from graphopt.passes.lift.canonicalize import Canonicalize
from graphopt.passes.recipe import Recipe
from graphopt.quality.judge import CHECK
from graphopt.tasks.graph import GRAPH
from graphopt.util.targets import Target
from tools.studies.real.dither import dither

QUESTION = "What is the capital of France?"
SENTENCES = (
    "A man is playing a guitar.",
    "Someone plays an instrument.",
    "The stock market fell sharply today.",
)
REPLY_TOKENS = 32
KEEP = "keep_codes"
RUNS = 20
Say = Callable[[str], None]


@dataclass(frozen=True)
class Row:
    """The figures of one artifact of a model.

    Attributes:
        model: the model's short name.
        recipe: that it is compiled by; ``keep_codes``: the codes of its own GGUF file, not dithered.
        error: why it failed; all figures are absent then.
        seconds: time to make the artifact and measure its quality, ``None`` where it already existed.
        bytes: of all its files.
        bits_per_weight: scales included.
        quality: figures of the check of quality, beside the float model that the artifact was made from.
        verdict: the same in a sentence.
        tokens_per_second: tokens of the reply in a second, prompt included.
        reply: what a chat model answers to :data:`QUESTION`.
        milliseconds: of a graph of any other kind: one run on random inputs with one thread, the fastest of 20.
        between: of an encoder: cosines of the first of :data:`SENTENCES` with the others.
    """

    model: str
    recipe: str
    error: str | None = None
    seconds: float | None = None
    bytes: int | None = None
    bits_per_weight: float | None = None
    quality: dict[str, float] = field(default_factory=dict)
    verdict: str | None = None
    tokens_per_second: float | None = None
    reply: str | None = None
    milliseconds: float | None = None
    between: tuple[float, ...] = ()


def run(name: str, checkpoint: Path, folder: Path, recipes: Sequence[str], tokens: int, say: Say) -> Iterator[Row]:
    """Do the main job on one model below ``folder``; yield a row for the export and one for each recipe.

    The export of an earlier run is reused; recipes are always applied. A ``.gguf`` checkpoint is dithered before that,
    and one more row keeps its own codes. The first row of an ``.onnx`` file is after ``canonicalize``.

    Args:
        name: the model's short name.
        checkpoint: a ``.gguf`` or ``.onnx`` file, or a Hugging Face folder.
        folder: where artifacts go.
        recipes: presets.
        tokens: of text that each artifact reads beside the float model.
        say: called with messages of progress.
    """
    float_artifact, seconds = folder / f"{name}-float32", None
    if not float_artifact.exists():
        say(f"{name}: exporting")
        begin = time.perf_counter()
        if checkpoint.suffix == ".onnx":
            only = Recipe(name="canonicalize", steps=(Canonicalize(),))
            graphopt.optimize(checkpoint, only, float_artifact, quality_tokens=tokens)
        else:
            graphopt.export(checkpoint, float_artifact)
        seconds = time.perf_counter() - begin
    start = float_artifact
    if checkpoint.suffix == ".gguf":
        start = folder / f"{name}-dithered"
        if not start.exists():
            say(f"{name}: dithering")
            dither(float_artifact, checkpoint, start)
    yield _measure(Row(name, "float32", seconds=seconds), start)
    for recipe in recipes:
        say(f"{name}: {recipe}")
        yield _compile_row(Row(name, recipe), start, recipe, folder / f"{name}-{recipe}", tokens)
    if checkpoint.suffix == ".gguf":
        say(f"{name}: {KEEP}")
        steps = (Canonicalize(), KeepCodes(file=checkpoint.absolute(), activations="int8"))
        recipe_of_codes = Recipe(name="keep-codes", steps=steps)
        yield _compile_row(
            Row(name, KEEP), float_artifact, recipe_of_codes, folder / f"{name}-{KEEP}", tokens, "ort-cpu"
        )


def _compile_row(
    row: Row, start: Path, recipe: str | Recipe, output: Path, tokens: int, target: Target | None = None
) -> Row:
    begin = time.perf_counter()
    try:
        # A preset that breaks a model is a result too.
        graphopt.optimize(start, recipe, output, target=target, overwrite=True, quality_tokens=tokens, force=True)
        return _measure(replace(row, seconds=time.perf_counter() - begin), output)
    except GraphoptError as error:
        return replace(row, error=str(error))


def _measure(row: Row, folder: Path) -> Row:
    manifest = read_manifest(folder)
    quality_checks = [check for check in manifest.checks if check.name == CHECK]
    row = replace(
        row,
        bytes=sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()),
        bits_per_weight=None if manifest.weights is None else manifest.weights.bits_per_weight,
        quality=dict(quality_checks[-1].figures) if quality_checks else {},
        verdict=str(quality_checks[-1].reason) if quality_checks else None,
    )
    if manifest.task == GRAPH.name:
        return _graph(row, folder)
    return _encoder(row, folder) if manifest.task == "encoder" else _chat(row, folder)


def _graph(row: Row, folder: Path) -> Row:
    artifact = artifacts.read(folder)
    session = open_session(folder / artifacts.MODEL, entries=artifact.manifest.session, threads=1)
    feeds = GRAPH.with_inputs(None).first_sample(artifact.model.graph, session)
    seconds = []
    for _ in range(RUNS):
        begin = time.perf_counter()
        session.run(None, feeds)
        seconds.append(time.perf_counter() - begin)
    return replace(row, milliseconds=min(seconds) * 1e3)


def _chat(row: Row, folder: Path) -> Row:
    reply, speed = answer(graphopt.load(folder), QUESTION)
    return replace(row, reply=reply, tokens_per_second=speed)


def answer(session: Session, question: str) -> tuple[str, float]:
    """Return a chat model's greedy reply to a question, and its tokens per second, prompt included.

    The chat template is that of the folder.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(session.file.parent))
    turns = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    begin = time.perf_counter()
    (completion,) = graphopt.generate(session, str(prompt), max_new_tokens=REPLY_TOKENS)
    return completion.text or "", len(completion.tokens) / (time.perf_counter() - begin)


def _encoder(row: Row, folder: Path) -> Row:
    cosines = cosine_matrix(load_encoder(folder).embed(SENTENCES))[0, 1:]
    return replace(row, between=tuple(map(float, cosines)))
