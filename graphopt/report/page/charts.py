"""Small drawings in SVG and boxes: curves over layers, histograms of weights, time as an icicle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphopt.report.escape import plain
from graphopt.report.page.html import Html, el
from graphopt.report.times import OUTSIDE, duration, parts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from graphopt.inference.profiling import Run
    from graphopt.quality.levels import Histogram
    from graphopt.quality.losses import ProductLoss
    from graphopt.report.trace import Trace

_WIDTH, _HEIGHT, _LEFT_MARGIN, _BOTTOM_MARGIN, _TOP_MARGIN = 240, 120, 46, 18, 8
_STEPS = 12

_LEVELS = 64
"""Levels of a format that are drawn one by one."""

_SMALLEST = 0.002
"""Share of the whole from which on a part has a box of its own."""


def curves(products: Sequence[ProductLoss], role: str) -> Html | None:
    """Return the errors of one role over the layers, alone and inside; ``None`` for fewer than two layers.

    Of experts the worst of each layer is drawn.
    """
    peers = [product for product in products if product.role == role]
    lines = {
        "alone": _worst((product.layer, product.local) for product in peers),
        "inside": _worst((product.layer, product.accumulated) for product in peers),
    }
    layers = [layer for layer, _ in lines["alone"]]
    if len(layers) < 2:
        return None
    top = max(value for line in lines.values() for _, value in line) or 1.0

    def point(layer: int, value: float) -> tuple[float, float]:
        across = (layer - layers[0]) / (layers[-1] - layers[0])
        return _LEFT_MARGIN + across * (_WIDTH - _LEFT_MARGIN - 8), _TOP_MARGIN + (1 - value / top) * (
            _HEIGHT - _TOP_MARGIN - _BOTTOM_MARGIN
        )

    shapes: list[Html] = []
    for name, line in lines.items():
        points = [point(*product) for product in line]
        shapes.append(el("polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points), class_=f"curve {name}"))
        for (layer, value), (x, y) in zip(line, points, strict=True):
            label = el("title", f"layer {layer}, {name}: {value:.2%}")
            shapes.append(el("circle", label, cx=f"{x:.1f}", cy=f"{y:.1f}", r=2.5, class_=name))
    foot = _HEIGHT - _BOTTOM_MARGIN
    axis = [
        el("line", x1=_LEFT_MARGIN, y1=foot, x2=_WIDTH - 8, y2=foot, class_="axis"),
        el("text", f"{top:.1%}", x=_LEFT_MARGIN - 6, y=_TOP_MARGIN + 5, class_="tick end"),
        el("text", "0", x=_LEFT_MARGIN - 6, y=foot, class_="tick end"),
        el("text", f"layer {layers[0]}", x=_LEFT_MARGIN, y=_HEIGHT - 3, class_="tick"),
        el("text", layers[-1], x=_WIDTH - 8, y=_HEIGHT - 3, class_="tick end"),
    ]
    text = f"errors of {role} from layer {layers[0]} to {layers[-1]}, at most {top:.1%}"
    return el("figure", el("figcaption", role), _svg(text, [*axis, *shapes]), class_="small")


def _width(label: str) -> str:
    return f"w{min(_STEPS, 1 + len(label) // 2)}"


def _worst(figures: Iterable[tuple[int | None, float | None]]) -> list[tuple[int, float]]:
    """Return the largest figure of each layer, in order: a layer of experts has several products of a role."""
    largest: dict[int, float] = {}
    for layer, value in figures:
        if layer is not None and value is not None:
            largest[layer] = max(value, largest.get(layer, value))
    return sorted(largest.items())


def histogram_chart(histogram: Histogram) -> Html:
    """Return how the numbers of a weight lie (bars) among the levels of its format (lines; dots: how often used)."""
    width, height, foot = 340, 120, 104
    scale = (width - 16) / (histogram.high - histogram.low)
    tallest, most_used = max(histogram.counts) or 1, max(histogram.used) or 1.0
    step = (width - 16) / len(histogram.counts)
    shapes = [
        el("rect", x=f"{8 + n * step:.1f}", y=f"{foot - 90 * count / tallest:.1f}", width=f"{step:.2f}",
           height=f"{90 * count / tallest:.1f}", class_="bin")
        for n, count in enumerate(histogram.counts) if count
    ]  # fmt: skip
    levels = list(zip(histogram.levels, histogram.used, strict=True)) if len(histogram.levels) <= _LEVELS else []
    for level, used in levels:
        x = f"{8 + (level - histogram.low) * scale:.1f}"
        shapes.append(el("line", x1=x, y1=foot, x2=x, y2=foot - 96, class_="level-line"))
        label = el("title", f"level {level:g}: {used:.1%} of the numbers")
        shapes.append(el("circle", label, cx=x, cy=f"{foot - 90 * used / most_used:.1f}", r=2.5, class_="used"))
    for end_level, side in ((histogram.levels[0], ""), (histogram.levels[-1], " end")):
        edge = 8 + (end_level - histogram.low) * scale + (14 if side else -14)
        shapes.append(
            el("text", f"{end_level:g}", x=f"{max(0, min(width, edge)):.1f}", y=height - 3, class_=f"tick{side}")
        )
    layer_text = "" if histogram.layer is None else f" of layer {histogram.layer}"
    text = f"{histogram.role}{layer_text}: {len(histogram.levels)} levels"
    return el("figure", el("figcaption", text), _svg(text, shapes, width, height), class_="small")


def _svg(label: str, shapes: Iterable[Html], width: int = _WIDTH, height: int = _HEIGHT) -> Html:
    return el("svg", shapes, viewBox=f"0 0 {width} {height}", width=width, height=height, role="img", aria_label=label)


def icicle(trace: Trace, run: Run) -> Html:
    """Return the time of a run as boxes: the whole, what nodes are for, and below each the layers."""
    seconds = parts(trace, run)
    index_of = {node.name: index for index, node in enumerate(trace.nodes)}
    totals = {role: sum(seconds for seconds, _ in layers.values()) for role, layers in seconds.items()}
    totals[OUTSIDE] = run.between
    order = sorted((role for role in totals if totals[role] >= _SMALLEST * run.seconds), key=lambda r: -totals[r])
    remainder = run.seconds - sum(totals[role] for role in order)
    hues = {role: number * 137 % 360 for number, role in enumerate(order) if role != OUTSIDE}
    columns = []
    for role in order:
        share, hue = totals[role] / run.seconds, hues.get(role)
        head = _cell(role, f"{role}: {duration(totals[role])}", hue, suffix=f" {share:.0%}")
        level = el("div", _layers(seconds.get(role, {}), role, hue, index_of), class_="level")
        columns.append(el("div", head, level, class_="column", style=f"flex-grow:{share:.5f}"))
    if remainder > 0:
        columns.append(el("div", class_="column", style=f"flex-grow:{remainder / run.seconds:.5f}"))
    whole = _cell(f"all {duration(run.seconds)}", f"all: {duration(run.seconds)}", None)
    return el("div", whole, el("div", columns, class_="level"), class_="icicle")


def _layers(
    seconds_of: Mapping[int | None, tuple[float, str]], role: str, hue: int | None, index_of: Mapping[str, int]
) -> Iterator[Html]:
    total = sum(seconds for seconds, _ in seconds_of.values()) or 1.0
    for layer in sorted(seconds_of, key=lambda number: -1 if number is None else number):
        seconds, slowest = seconds_of[layer]
        label = "" if layer is None else str(layer)
        layer_text = "outside of layers" if layer is None else f"layer {layer}"
        text = f"{role}, {layer_text}: {duration(seconds)}, slowest node {plain(slowest, 80)}"
        yield _cell(label, text, hue, f"flex-grow:{seconds / total:.5f}", index_of.get(slowest))


def _cell(label: str, title: str, hue: int | None, style: str = "", node: int | None = None, suffix: str = "") -> Html:
    # The style of the page hides a label, and first what is ``more``, in a box that is narrower than so many steps.
    suffix_html = el("span", suffix, class_=_width(label + suffix)) if suffix else None
    content = el("span", label, suffix_html, class_=_width(label))
    colour = "--grey:0%;" if hue is None else f"--hue:{hue};"
    return el("div", content, class_="cell", style=colour + style, title=title, data_node=node)
