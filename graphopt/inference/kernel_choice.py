"""What a model loses on a machine with another instruction set than its kernels were chosen for."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from graphopt.graph.diagnostics import Fact, PassReport, Rule
from graphopt.runtime_ops.costs import MEASURED_COSTS, NOT_MEASURED, Costs, shipped_costs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from graphopt.runtime_ops.costs import Choice
    from graphopt.util.targets import InstructionSet

ELSEWHERE = Rule(
    "lower.elsewhere",
    "kernels were chosen for {made_for} and this machine has {here}: {costs}. "
    "Optimizing again with --target ort-cpu:{here} chooses for it",
)
SLOWER = Rule(
    "lower.slower-elsewhere",
    "{count} product(s) of {bits} bits run by {kernel}'s kernel, which was measured to take {bound} {ratio:.2g} times "
    "as long as {other}'s",
)
UNKNOWN = Rule(
    "lower.unknown-elsewhere",
    "{count} product(s) of {bits} bits run by graphopt's kernel, which was not measured here",
)


def elsewhere(
    reports: Sequence[PassReport], made_for: str, machine: InstructionSet, costs: Costs | None = None
) -> Fact | None:
    """Return what it costs that another kernel would have been chosen here; ``None`` where no other is faster.

    Args:
        reports: of the passes that made the model; the last one of ``lower`` counts.
        made_for: the instruction set that it chose for.
        machine: the instruction set of this machine.
        costs: what kernels take; by default the costs that ship with the package.
    """
    table = shipped_costs() if costs is None else costs
    last = next((report for report in reversed(reports) if report.name == "lower"), None)
    if last is None or made_for == machine:
        return None
    counts = sorted(Counter(_choices(last)).items())
    facts = [_compare(table.compare(bits, machine), bits, is_own, count) for (bits, is_own), count in counts]
    differences = [fact for fact in facts if fact is not None]
    return ELSEWHERE(made_for=made_for, here=machine, costs=differences) if differences else None


def _compare(choice: Choice, bits: int, is_own: bool, count: int) -> Fact | None:
    """Return what is known of the other kernel; ``None`` where the choice stays, or none is faster.

    Args:
        choice: of a kernel on this machine.
        bits: of the products' weights.
        is_own: whether graphopt's kernel was chosen.
        count: products.
    """
    if choice.is_faster == is_own:
        return None
    if choice.reason.code == NOT_MEASURED.code:
        return UNKNOWN(count=count, bits=bits)
    figures = choice.reason.figures
    ours_us, theirs_us = (float(str(figures[name])) for name in ("ours_us", "theirs_us"))
    names = ("graphopt", "onnxruntime") if is_own else ("onnxruntime", "graphopt")
    # The figures are of the row in which graphopt's kernel has the least advantage.
    bound, ratio = ("up to", ours_us / theirs_us) if is_own else ("at least", theirs_us / ours_us)
    if ratio <= 1:  # a tie, which goes to graphopt's kernel
        return None
    return SLOWER(count=count, bits=bits, kernel=names[0], other=names[1], bound=bound, ratio=ratio)


def _choices(report: PassReport) -> Iterator[tuple[int, bool]]:
    """Yield the bits of each product that was chosen for by costs, and whether graphopt's kernel was chosen."""
    changes = ((change.what.figures.get("reason"), True) for change in report.changes)
    skips = ((skip.reason, False) for skip in report.skips)
    for reason, is_own in (*changes, *skips):
        if isinstance(reason, Fact) and reason.code in (MEASURED_COSTS.code, NOT_MEASURED.code):
            yield int(str(reason.figures["bits"])), is_own
