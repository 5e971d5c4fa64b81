"""Sentences: what a fact says in words, by the template of its rule."""

from __future__ import annotations

from graphopt import artifact, genai, passes, pipeline
from graphopt.analysis import bases, contrib
from graphopt.checks import kernels, notes, replay
from graphopt.checks.certificate import checker
from graphopt.facts import Fact
from graphopt.models import agreement, export, loading
from graphopt.models.unrolling import understood
from graphopt.quality import losses

DECLARE_RULES = (
    agreement,
    artifact,
    bases,
    checker,
    contrib,
    export,
    genai,
    kernels,
    loading,
    losses,
    notes,
    passes,
    pipeline,
    replay,
    understood,
)
"""Imported for the rules that they and what they import declare, so that facts read from a file have their words."""


def sentence(fact: Fact) -> str:
    """Return ``fact`` in words; the code with its figures where this version has no rule for it."""
    return str(fact)
