"""Where time goes, as tables: kinds of nodes with all layers together, and the passes that made them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from graphopt.analysis.structure.roles import OTHER_ROLE, SHARED_ROLE
from graphopt.report.console_table import ConsoleTable, figure_columns
from graphopt.report.escape import count_text, plain
from graphopt.report.trace_builder import BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from graphopt.inference.profiling import Profile, Run
    from graphopt.report.trace import Node, Trace

ROWS, _KERNELS = 25, 3
OUTSIDE = "between kernels"


@dataclass
class Row:
    """Nodes of one role, by what runs them.

    Attributes:
        role: what they are for; the operator for those that no rule knows.
        nodes: how many took time.
        seconds: of one run.
        bytes: of weights and caches that a token reads.
        kernels: the operators that onnxruntime ran.
        worst: the node that took most, and its seconds.
    """

    role: str
    nodes: int = 0
    seconds: float = 0.0
    bytes: float = 0.0
    kernels: Counter[str] = field(default_factory=Counter)
    worst: tuple[float, str] = (0.0, "")


def rows(trace: Trace, run: Run) -> list[Row]:
    """Put nodes of one role together, the slowest role first; what no kernel took is the row :data:`OUTSIDE`."""
    nodes = {node.name: node for node in trace.nodes}
    bytes_read = {measure.subject: measure.value for measure in trace.measures if measure.metric == BYTES}
    by_role: dict[str, Row] = {}
    for name, seconds in run.nodes.items():
        node = nodes.get(name)
        role = _role(node)
        row = by_role.setdefault(role, Row(role))
        row.nodes += 1
        row.seconds += seconds
        row.bytes += bytes_read.get(name, 0.0)
        row.kernels.update(run.kernels.get(name, ()))
        row.worst = max(row.worst, (seconds, name))
    by_role[OUTSIDE] = Row(OUTSIDE, seconds=run.between)
    return sorted(by_role.values(), key=lambda row: -row.seconds)


def parts(trace: Trace, run: Run) -> dict[str, dict[int | None, tuple[float, str]]]:
    """Return the seconds of each role in each layer (``None``: outside of layers), with the slowest node there."""
    nodes = {node.name: node for node in trace.nodes}
    seconds_of: dict[str, dict[int | None, tuple[float, str]]] = {}
    slowest: dict[tuple[str, int | None], float] = {}
    for name, seconds in run.nodes.items():
        node = nodes.get(name)
        role, layer = _role(node), None if node is None else node.layer
        total, worst = seconds_of.setdefault(role, {}).get(layer, (0.0, name))
        if seconds > slowest.get((role, layer), 0.0):
            slowest[role, layer], worst = seconds, name
        seconds_of[role][layer] = total + seconds, worst
    return seconds_of


def _role(node: Node | None) -> str:
    if node is None:
        return "added at load"
    return node.operator if node.role in (OTHER_ROLE, SHARED_ROLE) else node.role


def by_pass(trace: Trace, run: Run) -> list[tuple[str, float]]:
    """Return the seconds of nodes by the last pass that touched them, the most first."""
    nodes = {node.name: node for node in trace.nodes}
    seconds_of: dict[str, float] = {}
    for name, seconds in run.nodes.items():
        node = nodes.get(name)
        last = node.passes[-1] if node is not None and node.passes else "as it came in"
        seconds_of[last] = seconds_of.get(last, 0.0) + seconds
    return sorted(seconds_of.items(), key=lambda item: -item[1])


def times_table(trace: Trace, run: Run, bandwidth: float) -> ConsoleTable:
    """Show where the time of one run goes; of a single token also which share of the bandwidth a role reaches."""
    is_token = run.tokens == 1
    columns = figure_columns("nodes", "time", "share", *(["MB", "bandwidth"] if is_token else []))
    title = _title(run)
    table = ConsoleTable(["role", *columns, "kernels", "slowest node"], f"{title}: {duration(run.seconds)}")
    for row in rows(trace, run)[:ROWS]:
        reads = [f"{row.bytes / 1e6:.2f}", f"{bandwidth_share(row, bandwidth):.0%}"] if row.bytes else ["", ""]
        table.add_row(
            row.role,
            str(row.nodes or ""),
            duration(row.seconds),
            f"{row.seconds / run.seconds:.1%}",
            *(reads if is_token else []),
            kernels_of(row),
            f"{plain(row.worst[1])} {duration(row.worst[0])}" if row.worst[1] else "",
        )
    return table


def summary_lines(trace: Trace, measurement: Profile) -> Iterator[str]:
    """Say what was run, and how long it took."""
    for run in (measurement.prompt, measurement.token):
        if run is not None:
            yield from run_lines(trace, run)
    yield f"this machine reads memory at {measurement.bandwidth / 1e9:.1f} GB/s, probed in the same run"


def run_lines(trace: Trace, run: Run) -> Iterator[str]:
    """Say of one kind of run how long it took, and which passes made the nodes that took most of it."""
    speed = f", {run.tokens / run.seconds:,.1f} tokens/s" if run.tokens else ""
    yield (
        f"{_title(run)}: {duration(run.seconds)}{speed} (with the profiler {duration(run.profiled)}; times are scaled "
        "to a run without it)"
    )
    yield "by the last pass: " + ", ".join(f"{n} {s / run.seconds:.0%}" for n, s in by_pass(trace, run)[:6])


def _title(run: Run) -> str:
    if run.tokens == 1:
        return "one token"
    return f"a prompt of {run.tokens} tokens" if run.tokens else "one run"


def duration(seconds: float) -> str:
    """Return a time with three digits and its unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.2g} us" if seconds else "0"


def bandwidth_share(row: Row, bandwidth: float) -> float:
    """Return which share of the bandwidth of the memory the nodes of a row reach."""
    return row.bytes / row.seconds / bandwidth if row.seconds and bandwidth else 0.0


def kernels_of(row: Row) -> str:
    """Return the operators that onnxruntime ran for a row, those of most nodes first."""
    return count_text(dict(row.kernels.most_common(_KERNELS))) + (", ..." if len(row.kernels) > _KERNELS else "")
