"""The results of rounds as a table, as JSON and as a plot."""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Column, Table

from tools.bench.parts.comparisons import Comparison
from tools.bench.parts.engine import optional


@dataclass(frozen=True)
class Row:
    """One engine in one case.

    Attributes:
        case: the case, a dataclass.
        engine: the engine's name.
        median_us: the median of its rounds, in microseconds for one product or step.
        lowest_us: the lowest of them.
        highest_us: the highest.
        bytes: what a product or step must read and write.
        percent_of_bandwidth: the median share of the read bandwidth of the same rounds.
        error: the largest relative error of its copies, against float64 with the very weights or cache that it holds.
    """

    case: Hashable
    engine: str
    median_us: float
    lowest_us: float
    highest_us: float
    bytes: int
    percent_of_bandwidth: float
    error: float


@dataclass(frozen=True)
class Curve:
    """The median of an engine along an axis such as tokens.

    Attributes:
        name: what distinguishes this curve.
        x: the points on the axis.
        median_us: the median at each, in microseconds.
    """

    name: str
    x: list[int]
    median_us: list[float]


def curve_table(title: str, curves: Sequence[Curve]) -> Table:
    """Return the curves as columns of microseconds."""
    rich_table = Table(title=title, title_justify="left")
    for name in ("tokens", *(curve.name for curve in curves)):
        rich_table.add_column(name, justify="right", no_wrap=True)
    for x in sorted({x for curve in curves for x in curve.x}):
        medians = [dict(zip(curve.x, curve.median_us, strict=True)) for curve in curves]
        rich_table.add_row(str(x), *(f"{points[x]:.0f}" if x in points else "" for points in medians))
    return rich_table


def table(case: Hashable, rows: list[Row], bandwidth: float) -> Table:
    """Return the rows of a case, the fastest first."""
    title = f"{case}; memory reads at {bandwidth / 1e9:.1f} GB/s"
    rich_table = Table(Column("engine", no_wrap=True), title=title, title_justify="left")
    for name in ("µs", "lowest", "highest", "MB", "% of\nbandwidth", "error"):
        rich_table.add_column(name, justify="right", no_wrap=True)
    for row in sorted(rows, key=lambda row: row.median_us):
        rich_table.add_row(
            row.engine,
            f"{row.median_us:.0f}",
            f"{row.lowest_us:.0f}",
            f"{row.highest_us:.0f}",
            f"{row.bytes / 1e6:.1f}",
            f"{row.percent_of_bandwidth:.0f}",
            f"{row.error:.1e}",
        )
    return rich_table


def comparison_table(comparisons: list[Comparison]) -> Table:
    """Return how many times as fast as its peers each engine of graphopt is."""
    rich_table = Table(Column("engine", no_wrap=True), Column("against the fastest of its kind", no_wrap=True))
    rich_table.add_column("times as fast", justify="right")
    for comparison in comparisons:
        rich_table.add_row(comparison.engine, comparison.peer, f"{comparison.ratio:.2f}")
    return rich_table


def write_json(file: Path, machine: str, rows: list[Row], comparisons: list[Comparison], facts: dict[str, Any]) -> None:
    """Write the machine, the rows, the ratios and what else is worth keeping."""
    lists = {"rows": [asdict(row) for row in rows], "comparisons": [asdict(comparison) for comparison in comparisons]}
    file.write_text(json.dumps({"machine": machine, **facts, **lists}, indent=2) + "\n")


def write_plot(file: Path, machine: str, rows: list[Row], curves: Sequence[Curve] = ()) -> None:
    """Write a page that needs no network: curves, and case by case a bar for each engine, with its rounds' range.

    Raises:
        UnavailableError: plotly is not installed.
    """
    plotly = optional("plotly.graph_objects", package="plotly")
    subplots = optional("plotly.subplots", package="plotly")
    cases = list(dict.fromkeys(row.case for row in rows))
    titles = [*map(str, cases), *(["microseconds by tokens"] if curves else [])]
    figure = subplots.make_subplots(rows=len(titles), cols=1, subplot_titles=titles)
    height = 0
    for panel, case in enumerate(cases, start=1):
        case_rows = sorted((row for row in rows if row.case == case), key=lambda row: -row.median_us)
        height += 120 + 24 * len(case_rows)
        medians = [row.median_us for row in case_rows]
        bars = plotly.Bar(
            orientation="h",
            y=[row.engine for row in case_rows],
            x=medians,
            error_x={
                "type": "data",
                "symmetric": False,
                "array": [row.highest_us - row.median_us for row in case_rows],
                "arrayminus": [row.median_us - row.lowest_us for row in case_rows],
            },
            text=[f"{row.median_us:.0f} µs, {row.percent_of_bandwidth:.0f}%" for row in case_rows],
            textposition="inside",
            insidetextanchor="start",
            marker_color=["#2a7f62" if row.engine.startswith("graphopt") else "#9aa5b1" for row in case_rows],
            hovertemplate="%{y}: %{text} of the bandwidth<extra></extra>",
        )
        figure.add_trace(bars, row=panel, col=1)
        figure.update_xaxes(title_text="µs", row=panel, col=1)
    for curve in curves:
        line = plotly.Scatter(x=curve.x, y=curve.median_us, name=curve.name, mode="lines+markers+text")
        line.text, line.textposition = ["" for _ in curve.x[1:]] + [curve.name], "middle left"
        figure.add_trace(line, row=len(titles), col=1)
    if curves:
        height += 500
        figure.update_xaxes(type="log", title_text="tokens", row=len(titles), col=1)
        figure.update_yaxes(type="log", title_text="µs", row=len(titles), col=1)
    title = f"{machine}: medians, ranges of the rounds, share of the read bandwidth"
    figure.update_layout(height=height, showlegend=False, title=title)
    figure.write_html(file, include_plotlyjs=True)
