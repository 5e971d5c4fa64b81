"""The part of a page about time."""

from __future__ import annotations

from graphopt.profiling import Profile
from graphopt.view.page.html import Html, bar, el, section, table
from graphopt.view.times import ROWS, duration, kernels_of, reached, rows, told
from graphopt.view.trace import Trace


def time_section(trace: Trace, found: Profile) -> Html:
    """Return the part of a page about time."""
    parts: list[object] = [el("p", line) for line in told(trace, found)]
    for title, run in (("One token", found.token), ("A prompt", found.prompt)):
        if run is None:
            continue
        listed = rows(trace, run)[:ROWS]
        longest = max((row.seconds for row in listed), default=0.0) or 1.0
        lines = (
            (
                row.role,
                row.nodes or "",
                bar(row.seconds / longest, duration(row.seconds)),
                f"{row.seconds / run.seconds:.1%}",
                f"{reached(row, found.bandwidth):.0%}" if row.bytes and run.tokens == 1 else "",
                kernels_of(row),
                row.worst[1],
            )
            for row in listed
        )
        head = ("role", "nodes", "time", "share", "bandwidth", "kernels", "slowest node")
        parts += [el("h3", title), table(head, lines, right=(1, 3, 4))]
    return section("time", "Where time goes", parts)
