"""What passes and checks say about a model, as data: changes, skips, removals, checks, notes, and where each applies.

A fact is a code with figures, as a finding of a linter is::

    STORED = Rule("quantize_weights.stored", "{weight} as {format} in groups of {group}")

    ledger.changed(node, STORED(weight="up.weight", format="int4", group=32), [weight])

A :class:`Rule` is declared once, beside the code that states it. Programs read codes and figures;
:mod:`graphopt.report` fills the rule's template to show a fact to a person.
"""

from __future__ import annotations

import re
import string
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict

from graphopt.numerics.rotations.claims import Claims

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Effect = Literal["exact", "lossy"]
"""``exact``: the graph computes the same function; ``lossy``: it computes another, and the difference is measured."""

Status = Literal["proved", "measured", "failed", "not covered"]
"""What became of a check; there is no silent ok."""

Scalar = str | int | float | bool | None
Figure: TypeAlias = "Scalar | list[Scalar] | list[Fact] | Fact"
"""What a fact may carry: JSON scalars, lists of them, and other facts, such as the reason behind a reason."""

_CODE = re.compile(r"[a-z0-9_]+\.[a-z0-9-]+")


class Fact(BaseModel):
    """One statement: what kind it is of, and the figures that belong to it.

    ``str()`` fills the template of its rule where that is imported, as it is for every fact that this process stated;
    :func:`graphopt.report.sentences.sentence` does so for facts that were read from a file.

    Attributes:
        code: which rule it is of, such as ``quantize_weights.stored``.
        figures: names, formats, sizes, and whatever else its rule names.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    code: str
    figures: dict[str, Figure] = {}

    def __str__(self) -> str:
        rule = RULES.get(self.code)
        if rule is not None:
            return rule.sentence(self.figures)
        figures = ", ".join(f"{name} {_Words().format_field(value, '')}" for name, value in self.figures.items())
        return f"{self.code} ({figures})" if figures else self.code

    def __hash__(self) -> int:
        return hash(str(self))


class Rule:
    """A kind of fact: a stable code, and the template of the sentence that is made of it.

    Args:
        code: the pass or part that states it, a dot, and what it states: ``fold_norms.gain-folded``. It never changes.
        template: the sentence, a format string over the figures. A list is joined by commas, or by "and"
            with ``:and``, one of facts by semicolons; ``!r`` shows it with its brackets; a fact becomes its sentence;
            ``None`` becomes nothing.
        also: optional figures that the sentence does not show.
        clauses: for optional figures, what stands behind the template, in order, where the figure is given and not
            zero, empty or false.

    Raises:
        ValueError: the code has another form, or another rule has it.
    """

    def __init__(self, code: str, template: str, *, also: Sequence[str] = (), **clauses: str) -> None:
        if _CODE.fullmatch(code) is None:
            raise ValueError(f"the code {code!r} is not of the form part.what-it-states")
        if code in RULES:
            raise ValueError(f"two rules have the code {code}")
        self.code, self.template, self.clauses = code, template, clauses
        self.required_figures = _fields(template)
        self.optional_figures = frozenset({*also, *clauses}).union(*(_fields(clause) for clause in clauses.values()))
        RULES[code] = self

    def __call__(self, **figures: Figure | Sequence[Scalar] | Sequence[Fact]) -> Fact:
        """State a fact of this kind; optional figures that are ``None`` are left out.

        Raises:
            TypeError: a figure of the template is missing, one is given that the rule does not name, or one is no JSON.
        """
        missing = self.required_figures - figures.keys()
        unknown = figures.keys() - self.required_figures - self.optional_figures
        if missing or unknown:
            raise TypeError(f"{self.code}: missing figures {sorted(missing)}, unknown figures {sorted(unknown)}")
        content: dict[str, Any] = {}
        for name, value in figures.items():
            if value is None and name not in self.required_figures:
                continue
            plain: Any = value if isinstance(value, _PLAIN) else list(value)
            if not all(isinstance(element, _PLAIN) for element in (plain if isinstance(plain, list) else ())):
                raise TypeError(f"{self.code}: the figure {name} holds what is no JSON: {plain}")
            content[name] = plain
        # Checked above; validation by pydantic takes ten times as long, and analyses state facts by the thousand.
        return Fact.model_construct(code=self.code, figures=content)

    def sentence(self, figures: Mapping[str, Figure]) -> str:
        """Fill the template."""
        parts = [self.template, *(clause for name, clause in self.clauses.items() if figures.get(name))]
        return "".join(_Words().vformat(part, (), figures) for part in parts)


_PLAIN = (str, int, float, type(None), Fact)


class _Words(string.Formatter):
    """Fills templates: a figure that a file lacks is shown as ``?``."""

    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        del args
        return kwargs.get(str(key), "?")

    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None:
            return ""
        if isinstance(value, (list, tuple)):
            plain = f" {format_spec} " if format_spec else ", "
            return ("; " if any(isinstance(element, Fact) for element in value) else plain).join(map(str, value))
        return str(value) if isinstance(value, str) else format(value, format_spec)


def _fields(template: str) -> frozenset[str]:
    return frozenset(name for _, name, _, _ in string.Formatter().parse(template) if name is not None)


RULES: dict[str, Rule] = {}
"""Every rule that was imported, by its code."""


class Change(BaseModel):
    """One rewrite: the node or weight, and what was done to it."""

    where: str
    what: Fact


class Skip(BaseModel):
    """One place that a pass looked at and left alone, and why.

    Attributes:
        where: the node, value or weight that stays as it is.
        reason: why.
        node: the node that is the reason, where it is another one.
    """

    where: str
    reason: Fact
    node: str | None = None


class Removal(BaseModel):
    """One node that is gone.

    Attributes:
        where: its name.
        op_type: its operator.
        by: the nodes that were made from it, or that make its outputs now; none where nothing needed it any more.
    """

    where: str
    op_type: str
    by: list[str] = []


class PassReport(BaseModel):
    """What one run of a pass did to a model.

    Attributes:
        name: the pass.
        run: which of the runs of this pass it was, from 1, in the life of the model.
        effect: what the pass declares of itself.
        changes: what it rewrote.
        skips: what it left alone, and why.
        removed: the nodes that are gone.
        seconds: how long it took.
        claims: what it claims for the certificate to check.
    """

    name: str
    run: int = 0
    effect: Effect
    changes: list[Change] = []
    skips: list[Skip] = []
    removed: list[Removal] = []
    seconds: float = 0.0
    claims: Claims | None = None


class Finding(BaseModel):
    """One statement about one place of the graph.

    Attributes:
        node: the node of the graph after, or the graph input or output, that it is about.
        tensor: the tensor at fault, or the weight that was checked.
        status: ``proved``, ``measured``, ``failed`` or ``not covered``.
        reason: the evidence, or what is wrong.
        figures: the numbers behind it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    node: str
    tensor: str | None
    status: Status
    reason: Fact
    figures: dict[str, float] = {}


class Check(BaseModel):
    """The result of one check: never a silent ok.

    Attributes:
        name: what was checked.
        after: the pass after which it was checked.
        run: which of the runs of that pass, see :class:`PassReport`; 0 for a check that is about no pass.
        status: ``proved``, ``measured``, ``failed`` or ``not covered``.
        reason: the evidence, or why there is none.
        figures: the numbers behind it.
        findings: the same place by place, where a check has places.
    """

    name: str
    after: str
    run: int = 0
    status: Status
    reason: Fact
    figures: dict[str, float] = {}
    findings: list[Finding] = []
