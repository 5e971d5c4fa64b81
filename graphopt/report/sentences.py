"""Sentences: what a fact says in words, by the template of its rule."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from graphopt.analysis.bases import search as bases
from graphopt.analysis.structure import contrib
from graphopt.artifact import artifact, genai
from graphopt.compile import pipeline, replay
from graphopt.compile.doctor import doctor
from graphopt.compile.doctor.examination import EXAMINATIONS
from graphopt.graph.diagnostics import RULES, Fact
from graphopt.inference import kernel_choice
from graphopt.models import agreement, export, loading, mtp_head
from graphopt.models.unrolling import refusals
from graphopt.passes import PASSES
from graphopt.quality import answers, classes, losses, seq2seq
from graphopt.tasks import signals
from graphopt.tasks.vision_language import embedding
from graphopt.verification import kernels, notes
from graphopt.verification.certificate import checker

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

Subject = TypeVar("Subject")

_SENTENCES = 3
"""Sentences of one kind that are shown each; more than these become one."""

DECLARE_RULES = (
    agreement,
    answers,
    artifact,
    bases,
    checker,
    contrib,
    doctor,
    embedding,
    export,
    genai,
    kernel_choice,
    kernels,
    loading,
    mtp_head,
    classes,
    losses,
    seq2seq,
    notes,
    pipeline,
    replay,
    refusals,
    signals,
    *PASSES.values(),
    *EXAMINATIONS.values(),
)
"""Imported for the rules that they and what they import declare, so that facts read from a file have their words."""


def sentence(fact: Fact) -> str:
    """Return ``fact`` in words; the code with its figures where this version has no rule for it."""
    return str(fact)


@dataclass(frozen=True)
class Range:
    """Numbers of several facts, which a template shows as their smallest and their largest."""

    smallest: float
    largest: float

    def __format__(self, spec: str) -> str:
        return f"{self.smallest:{spec}} to {self.largest:{spec}}"


def fold_reasons(reasons: Iterable[tuple[Fact, Subject]]) -> list[tuple[str, list[Subject]]]:
    """Return each sentence with the subjects that it is about.

    Facts of one kind have the same rule, and so do the facts inside them. Where a kind has more than a few sentences,
    it becomes one: with the range of each number, and the words of the first fact.
    """
    kinds: defaultdict[Hashable, dict[str, list[Subject]]] = defaultdict(dict)
    facts: defaultdict[Hashable, list[Fact]] = defaultdict(list)
    for fact, subject in reasons:
        kind = _kind(fact)
        facts[kind].append(fact)
        kinds[kind].setdefault(sentence(fact), []).append(subject)
    sentences: list[tuple[str, list[Subject]]] = []
    for kind, subjects in kinds.items():
        if len(subjects) > _SENTENCES:
            sentences.append(
                (_joint_sentence(facts[kind]), [subject for group in subjects.values() for subject in group])
            )
        else:
            sentences += subjects.items()
    return sentences


def _kind(fact: Fact) -> Hashable:
    return fact.code, *(_kind(value) for value in fact.figures.values() if isinstance(value, Fact))


def _joint_sentence(facts: Sequence[Fact]) -> str:
    """Return one sentence for facts of one kind."""
    figures: dict[str, Any] = dict(facts[0].figures)
    for name in figures:
        values = [fact.figures.get(name) for fact in facts]
        numbers = [value for value in values if isinstance(value, int | float)]
        inner = [value for value in values if isinstance(value, Fact)]
        if len(numbers) == len(values) and len(set(numbers)) > 1:
            figures[name] = Range(min(numbers), max(numbers))
        elif len(inner) == len(values):
            figures[name] = _joint_sentence(inner)
    rule = RULES.get(facts[0].code)
    return sentence(facts[0]) if rule is None else rule.sentence(figures)
