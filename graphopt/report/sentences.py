"""Sentences: what a fact says in words, by the template of its rule."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphopt.analysis.bases import search as bases
from graphopt.analysis.structure import contrib
from graphopt.artifact import artifact, genai
from graphopt.compile import pipeline, replay
from graphopt.inference import kernel_choice
from graphopt.models import agreement, export, loading
from graphopt.models.unrolling import refusals
from graphopt.passes import PASSES
from graphopt.quality import losses
from graphopt.verification import kernels, notes
from graphopt.verification.certificate import checker

if TYPE_CHECKING:
    from graphopt.graph.diagnostics import Fact

DECLARE_RULES = (
    agreement,
    artifact,
    bases,
    checker,
    contrib,
    export,
    genai,
    kernel_choice,
    kernels,
    loading,
    losses,
    notes,
    pipeline,
    replay,
    refusals,
    *PASSES.values(),
)
"""Imported for the rules that they and what they import declare, so that facts read from a file have their words."""


def sentence(fact: Fact) -> str:
    """Return ``fact`` in words; the code with its figures where this version has no rule for it."""
    return str(fact)
