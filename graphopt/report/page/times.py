"""The part of a page about time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphopt.report.page.charts import icicle
from graphopt.report.page.html import Html, bar, el, section, table
from graphopt.report.times import ROWS, bandwidth_share, duration, kernels_of, rows, run_lines

if TYPE_CHECKING:
    from graphopt.inference.profiling import Profile
    from graphopt.report.trace import Trace


def time_section(trace: Trace, measurement: Profile) -> Html:
    """Return the part of a page about time."""
    text = f"This machine reads memory at {measurement.bandwidth / 1e9:.1f} GB/s, probed in the same run. "
    note = "A share of the bandwidth above 100% means that the processor's cache held what was read."
    parts: list[object] = [el("p", text, note, class_="note")]
    for title, run in (("One token", measurement.token), ("A prompt", measurement.prompt)):
        if run is None:
            continue
        slowest_rows = rows(trace, run)[:ROWS]
        longest = max((row.seconds for row in slowest_rows), default=0.0) or 1.0
        lines = (
            (
                row.role,
                row.nodes or "",
                bar(row.seconds / longest, duration(row.seconds)),
                f"{row.seconds / run.seconds:.1%}",
                f"{bandwidth_share(row, measurement.bandwidth):.0%}" if row.bytes and run.tokens == 1 else "",
                kernels_of(row),
                row.worst[1],
            )
            for row in slowest_rows
        )
        head = ("role", "nodes", "time", "share", "bandwidth", "kernels", "slowest node")
        spoken = (el("p", f"{line[0].upper()}{line[1:]}.") for line in run_lines(trace, run))
        parts += [el("h3", title), *spoken, icicle(trace, run), table(head, lines, right=(1, 3, 4), long=(5, 6))]
    return section("time", "Where time goes", parts)
