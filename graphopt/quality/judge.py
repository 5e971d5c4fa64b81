"""The verdict on a compile: the artifact that is about to be written, beside the model as it came in."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from graphopt.errors import GraphoptError, VerificationError
from graphopt.graph.diagnostics import Check, Fact, Rule
from graphopt.inference.embeddings import evaluate_embeddings, load_encoder
from graphopt.quality.compare import TOKENS, WINDOW, ReferenceOutputs, compare, run_reference
from graphopt.quality.texts import documentation, held_out_texts
from graphopt.quality.verdict import Requirement, verdict_of
from graphopt.tasks import TASKS
from graphopt.util.memory import available_memory
from graphopt.util.processors import processors
from graphopt.util.progress import Progress, silent

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


CHECK = "quality"
"""The name of the check."""

TEXT = Rule(
    "quality.text", "{verdict}: divergence {kl:.4f} nats, same first choice {same:.1%}, {tokens} tokens of text"
)
NOT_FINITE = Rule("quality.not-finite", "{verdict}: its logits are NaN or infinite somewhere in {tokens} tokens")
EMBEDDINGS = Rule("quality.embeddings", "{verdict}: cosine of embeddings {cosine:.5f} on {texts} sentences")
NOT_JUDGED = Rule("quality.not-judged", "{why}")

Ask = Callable[[], ReferenceOutputs]
"""Waits for what a reference says."""

_SENTENCES = 64
# Times the size of the reference that must be free to run it beside other work: weights, packed weights, and as much of
# the model that is compiled.
_MODELS = 5


@contextlib.contextmanager
def reference_beside(reference: Path | None, *, window: int = WINDOW, tokens: int = TOKENS) -> Iterator[Ask | None]:
    """Let a thread of its own run the reference of :func:`judge` meanwhile, where there are processors and memory.

    Args:
        reference: as for :func:`judge`; ``None`` for no model, then nothing is run.
        window: see there.
        tokens: see there.

    Yields:
        What waits for it and returns what it says, or raises as :func:`graphopt.quality.compare.run_reference` does;
        ``None`` where it is not run.
    """
    if reference is None or processors() < 2 or not 0 < _bytes_of(reference) * _MODELS < available_memory():
        yield None
        return
    stop = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(
            lambda: run_reference(reference, held_out_texts(), tokens=tokens, window=window, is_stopped=stop.is_set)
        )
        try:
            yield future.result
        finally:
            stop.set()


def _bytes_of(model: Path) -> int:
    """Return the size of an artifact, or of a file with what lies beside it; 0 where there is none."""
    folder = model if model.is_dir() else model.parent
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file()) if model.exists() else 0


def judge(  # noqa: PLR0913, what all kinds of models are judged on
    reference: Path,
    artifact: Path,
    task: str,
    *,
    texts: Sequence[str] | None = None,
    window: int = WINDOW,
    tokens: int = TOKENS,
    on_stage: Progress = silent,
    ask: Ask | None = None,
    inputs: Path | None = None,
) -> Check:
    """Measure an artifact on held-out text, beside what it was made from.

    Args:
        reference: the folder or file that it was made from.
        artifact: the folder of the artifact.
        task: what kind of model it is.
        texts: what to read; :func:`graphopt.quality.texts.held_out_texts` by default, which is in English and Python.
        window: tokens that are seen at once.
        tokens: tokens to score.
        on_stage: called when a stage begins.
        ask: asks for what the reference says about the same texts, where it is run meanwhile.
        inputs: of a model that reads no text: the file or folder of what it is fed; random inputs without.

    Returns:
        The check, measured with a verdict, or not covered with the reason.
    """
    try:
        figures = quality_figures(
            reference,
            artifact,
            task,
            texts=texts,
            window=window,
            tokens=tokens,
            on_stage=on_stage,
            ask=ask,
            inputs=inputs,
        )
    except (GraphoptError, FileNotFoundError) as error:
        return not_judged(NOT_JUDGED(why=str(error)))
    reason = TASKS[task].describe_quality(verdict_of(figures), figures)
    return Check(name=CHECK, after="the recipe", status="measured", reason=reason, figures=figures)


def quality_figures(  # noqa: PLR0913, as above
    reference: Path,
    artifact: Path,
    task: str,
    *,
    texts: Sequence[str] | None = None,
    window: int = WINDOW,
    tokens: int = TOKENS,
    on_stage: Progress = silent,
    ask: Ask | None = None,
    inputs: Path | None = None,
) -> dict[str, float]:
    """Return the figures of :class:`graphopt.quality.Quality`, of an encoder those of its embeddings; finite ones only.

    Args:
        reference: as for :func:`judge`, and so are the others.
        artifact: see there.
        task: see there.
        texts: see there.
        window: see there.
        tokens: see there.
        on_stage: see there.
        ask: see there.
        inputs: see there.

    Raises:
        InputError: see :func:`graphopt.quality.compare` and :func:`graphopt.inference.embeddings.evaluate_embeddings`.
        FileNotFoundError: this Python was installed without the texts.
    """
    reading = {"texts": texts, "window": window, "tokens": tokens, "on_stage": on_stage, "ask": ask}
    return TASKS[task].with_inputs(inputs).measure_quality(reference, artifact, **reading)


def text_quality(
    reference: Path,
    artifact: Path,
    *,
    texts: Sequence[str] | None,
    window: int,
    tokens: int,
    on_stage: Progress,
    ask: Ask | None,
) -> dict[str, float]:
    """Return the figures of a causal language model; see :func:`quality_figures`."""
    texts = held_out_texts() if texts is None else texts
    if ask is not None:
        on_stage("reference")
    first = reference if ask is None else ask()
    quality = compare(first, artifact, texts, tokens=tokens, window=window, on_stage=on_stage)
    # JSON has no NaN and no infinity.
    return {name: value for name, value in quality.model_dump().items() if math.isfinite(value)}


def describe_text_quality(verdict: str, figures: Mapping[str, float]) -> Fact:
    """Return the sentence about the figures of :func:`text_quality`."""
    tokens = int(figures["tokens"])
    if "kl_mean" not in figures:
        return NOT_FINITE(verdict=verdict, tokens=tokens)
    return TEXT(verdict=verdict, kl=figures["kl_mean"], same=figures["same_first_choice"], tokens=tokens)


def embedding_quality(
    reference: Path, artifact: Path, *, texts: Sequence[str] | None, **_reading: object
) -> dict[str, float]:
    """Return the figures of an encoder, on sentences of texts; see :func:`quality_figures`."""
    sentences = sentences_of(documentation() if texts is None else "\n".join(texts))
    closeness = evaluate_embeddings(load_encoder(artifact), load_encoder(reference), "\n".join(sentences))
    return {name: float(value) for name, value in closeness.model_dump(exclude={"seconds"}).items()}


def describe_embedding_quality(verdict: str, figures: Mapping[str, float]) -> Fact:
    """Return the sentence about the figures of :func:`embedding_quality`."""
    return EMBEDDINGS(verdict=verdict, cosine=figures["cosine_mean"], texts=int(figures["texts"]))


def not_judged(reason: Fact) -> Check:
    """Return the check of a model whose quality was not measured."""
    return Check(name=CHECK, after="the recipe", status="not covered", reason=reason)


def confirm(check: Check, requirement: Requirement | None, *, force: bool) -> None:
    """Refuse a model that is broken, or does not meet what was asked.

    Raises:
        VerificationError: it is so, and nothing was written.
    """
    if check.status != "measured":
        if requirement is not None:
            raise VerificationError(
                f"--require {requirement.text} cannot be confirmed: {check.reason}; nothing was written",
                remedy="give a model that can be run, with its tokenizer",
            )
        return
    unmet = [] if requirement is None else requirement.unmet(check.figures)
    if unmet:
        raise VerificationError(
            f"the model does not meet what is required: {'; '.join(unmet)}; nothing was written",
            remedy="choose a recipe of more bits, or a weaker requirement",
        )
    if verdict_of(check.figures) == "broken" and not force:
        raise VerificationError(
            f"the model is {check.reason}; nothing was written",
            remedy="choose a recipe of more bits, or pass --force to write it all the same",
        )


def sentences_of(text: str) -> list[str]:
    """Return the first lines of a text that read like sentences: five words at least, no more than 300 characters."""
    lines = (line.strip() for line in text.splitlines())
    return [line for line in dict.fromkeys(lines) if len(line.split()) >= 5 and len(line) <= 300][:_SENTENCES]
