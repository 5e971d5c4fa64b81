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

_WIDTH, _HEIGHT, _LEFT, _BELOW, _TOP = 240, 120, 46, 18, 8
_STEPS = 12

_LEVELS = 64
"""Levels of a format that are drawn one by one."""

_SMALLEST = 0.002
"""Share of the whole from which on a part has a box of its own."""


def curves(products: Sequence[ProductLoss], role: str) -> Html | None:
    """Return the errors of one role over the layers, alone and inside; ``None`` for fewer than two layers.

    Of experts the worst of each layer is drawn.
    """
    those = [each for each in products if each.role == role]
    lines = {
        "alone": _worst((each.layer, each.local) for each in those),
        "inside": _worst((each.layer, each.accumulated) for each in those),
    }
    layers = [layer for layer, _ in lines["alone"]]
    if len(layers) < 2:
        return None
    top = max(value for line in lines.values() for _, value in line) or 1.0

    def place(layer: int, value: float) -> tuple[float, float]:
        across = (layer - layers[0]) / (layers[-1] - layers[0])
        return _LEFT + across * (_WIDTH - _LEFT - 8), _TOP + (1 - value / top) * (_HEIGHT - _TOP - _BELOW)

    drawn: list[Html] = []
    for name, line in lines.items():
        points = [place(*each) for each in line]
        drawn.append(el("polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points), class_=f"curve {name}"))
        for (layer, value), (x, y) in zip(line, points, strict=True):
            label = el("title", f"layer {layer}, {name}: {value:.2%}")
            drawn.append(el("circle", label, cx=f"{x:.1f}", cy=f"{y:.1f}", r=2.5, class_=name))
    foot = _HEIGHT - _BELOW
    axis = [
        el("line", x1=_LEFT, y1=foot, x2=_WIDTH - 8, y2=foot, class_="axis"),
        el("text", f"{top:.1%}", x=_LEFT - 6, y=_TOP + 5, class_="tick end"),
        el("text", "0", x=_LEFT - 6, y=foot, class_="tick end"),
        el("text", f"layer {layers[0]}", x=_LEFT, y=_HEIGHT - 3, class_="tick"),
        el("text", layers[-1], x=_WIDTH - 8, y=_HEIGHT - 3, class_="tick end"),
    ]
    said = f"errors of {role} from layer {layers[0]} to {layers[-1]}, at most {top:.1%}"
    return el("figure", el("figcaption", role), _svg(said, [*axis, *drawn]), class_="small")


def _width(label: str) -> str:
    return f"w{min(_STEPS, 1 + len(label) // 2)}"


def _worst(figures: Iterable[tuple[int | None, float | None]]) -> list[tuple[int, float]]:
    """Return the largest figure of each layer, in order: a layer of experts has several products of a role."""
    found: dict[int, float] = {}
    for layer, value in figures:
        if layer is not None and value is not None:
            found[layer] = max(value, found.get(layer, value))
    return sorted(found.items())


def histogram_chart(found: Histogram) -> Html:
    """Return how the numbers of a weight lie (bars) among the levels of its format (lines; dots: how often used)."""
    width, height, foot = 340, 120, 104
    scale = (width - 16) / (found.high - found.low)
    tallest, most = max(found.counts) or 1, max(found.used) or 1.0
    step = (width - 16) / len(found.counts)
    drawn = [
        el("rect", x=f"{8 + n * step:.1f}", y=f"{foot - 90 * count / tallest:.1f}", width=f"{step:.2f}",
           height=f"{90 * count / tallest:.1f}", class_="bin")
        for n, count in enumerate(found.counts) if count
    ]  # fmt: skip
    few = list(zip(found.levels, found.used, strict=True)) if len(found.levels) <= _LEVELS else []
    for level, used in few:
        x = f"{8 + (level - found.low) * scale:.1f}"
        drawn.append(el("line", x1=x, y1=foot, x2=x, y2=foot - 96, class_="level-line"))
        label = el("title", f"level {level:g}: {used:.1%} of the numbers")
        drawn.append(el("circle", label, cx=x, cy=f"{foot - 90 * used / most:.1f}", r=2.5, class_="used"))
    for at, side in ((found.levels[0], ""), (found.levels[-1], " end")):
        edge = 8 + (at - found.low) * scale + (14 if side else -14)
        drawn.append(el("text", f"{at:g}", x=f"{max(0, min(width, edge)):.1f}", y=height - 3, class_=f"tick{side}"))
    where = "" if found.layer is None else f" of layer {found.layer}"
    said = f"{found.role}{where}: {len(found.levels)} levels"
    return el("figure", el("figcaption", said), _svg(said, drawn, width, height), class_="small")


def _svg(said: str, drawn: Iterable[Html], width: int = _WIDTH, height: int = _HEIGHT) -> Html:
    return el("svg", drawn, viewBox=f"0 0 {width} {height}", width=width, height=height, role="img", aria_label=said)


def icicle(trace: Trace, run: Run) -> Html:
    """Return the time of a run as boxes: the whole, what nodes are for, and below each the layers."""
    found = parts(trace, run)
    places = {node.name: place for place, node in enumerate(trace.nodes)}
    totals = {role: sum(seconds for seconds, _ in layers.values()) for role, layers in found.items()}
    totals[OUTSIDE] = run.between
    order = sorted((role for role in totals if totals[role] >= _SMALLEST * run.seconds), key=lambda r: -totals[r])
    rest = run.seconds - sum(totals[role] for role in order)
    hues = {role: number * 137 % 360 for number, role in enumerate(order) if role != OUTSIDE}
    columns = []
    for role in order:
        share, hue = totals[role] / run.seconds, hues.get(role)
        head = _cell(role, f"{role}: {duration(totals[role])}", hue, more=f" {share:.0%}")
        below = el("div", _layers(found.get(role, {}), role, hue, places), class_="level")
        columns.append(el("div", head, below, class_="column", style=f"flex-grow:{share:.5f}"))
    if rest > 0:
        columns.append(el("div", class_="column", style=f"flex-grow:{rest / run.seconds:.5f}"))
    whole = _cell(f"all {duration(run.seconds)}", f"all: {duration(run.seconds)}", None)
    return el("div", whole, el("div", columns, class_="level"), class_="icicle")


def _layers(
    found: Mapping[int | None, tuple[float, str]], role: str, hue: int | None, places: Mapping[str, int]
) -> Iterator[Html]:
    total = sum(seconds for seconds, _ in found.values()) or 1.0
    for layer in sorted(found, key=lambda each: -1 if each is None else each):
        seconds, slowest = found[layer]
        label = "" if layer is None else str(layer)
        where = "outside of layers" if layer is None else f"layer {layer}"
        said = f"{role}, {where}: {duration(seconds)}, slowest node {plain(slowest, 80)}"
        yield _cell(label, said, hue, f"flex-grow:{seconds / total:.5f}", places.get(slowest))


def _cell(label: str, said: str, hue: int | None, style: str = "", node: int | None = None, more: str = "") -> Html:
    # The style of the page hides a label, and first what is ``more``, in a box that is narrower than so many steps.
    behind = el("span", more, class_=_width(label + more)) if more else None
    shown = el("span", label, behind, class_=_width(label))
    colour = "--grey:0%;" if hue is None else f"--hue:{hue};"
    return el("div", shown, class_="cell", style=colour + style, title=said, data_node=node)
