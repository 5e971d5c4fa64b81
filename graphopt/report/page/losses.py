"""The part of a page about quality: where it was lost, and what would bring it back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from graphopt.quality.losses import Losses, ProductLoss
from graphopt.report.losses import group_name, recipe_lines, remainder
from graphopt.report.page.charts import curves, histogram_chart
from graphopt.report.page.html import Html, bar, el, section, shade, table
from graphopt.report.tables import size_text

if TYPE_CHECKING:
    from graphopt.quality.spread import Spread


def quality_section(lost: Losses | None) -> Html | None:
    """Return errors of products as heat maps and curves, outliers, and what groups of products do to the whole."""
    if lost is None or not lost.products:
        return None
    parts: list[object] = [
        el(
            "p",
            f"Errors are in percent of what a product makes in floats, on {lost.tokens:,} tokens of text. "
            "Alone: with inputs of the float model, so it is the product's own error. "
            "Inside: in the compressed model, behind all errors before it. "
            "First token: that of each text, inside; the others leave it out, for its numbers are often huge."
            + (" Of experts the worst of a layer is shown." if _experts(lost) else ""),
        ),
        el(
            "div",
            _maps(lost, (("Alone", lambda each: each.local), ("Inside", lambda each: each.accumulated)), "{:.1%}"),
            _maps(lost, (("First token", lambda each: each.first_token),), "{:.1%}"),
            class_="pair",
        ),
    ]
    drawn = [each for role in _roles(lost) if (each := curves(lost.products, role)) is not None]
    if drawn:
        legend = el("p", el("i", class_="key alone"), "alone ", el("i", class_="key inside"), "inside", class_="note")
        parts += [el("h3", "From layer to layer"), legend, el("div", drawn, class_="charts")]
    parts += _groups(lost)
    if any(each.read is not None for each in lost.products):
        parts += [
            el("h3", "Outliers of what products read"),
            el("p", "Kurtosis: 3 for a normal distribution, more where few numbers are large.", class_="note"),
            _maps(
                lost,
                (
                    ("In the model before", lambda each: _kurtosis(each.read_before)),
                    ("Behind folded norms and rotations", lambda each: _kurtosis(each.read)),
                ),
                "{:.1f}",
            ),
        ]
    if lost.histograms:
        parts += [
            el("h3", "Weights among the levels of their format"),
            el(
                "p",
                "Of each kind the product that errs most by itself. Bars: numbers of the float model, in units of the "
                "scales. Lines: the levels of the format; a dot says how often the level is used.",
                class_="note",
            ),
            el("div", (histogram_chart(each) for each in lost.histograms), class_="charts"),
        ]
    return section("quality", "Where quality was lost", parts)


def _groups(lost: Losses) -> Iterator[object]:
    if lost.kl is None:
        return
    kl = lost.kl or 1.0
    lines = (
        (
            group_name(each),
            bar((each.only or 0.0) / kl, f"{each.only:.4f}") if each.only is not None else "",
            bar(each.kl / kl, f"{each.kl:.4f}"),
            f"{round((lost.kl - each.kl) / kl, 2) + 0.0:.0%}",
            size_text(each.bytes),
        )
        for each in lost.groups
    )
    yield el("h3", "Which products cause it")
    yield el("p", f"The divergence from the float model is {lost.kl:.4f} nats per token. Groups of layers are halved "
             "where they matter.", class_="note")  # fmt: skip
    head = ("group", "only it is quantized", "all but it is quantized", "comes back", "costs in floats")
    yield table(head, lines, right=(3, 4))
    if lost.remainder is not None:
        said = remainder(lost)
        yield el("p", said[0].upper() + said[1:] + ".")
    if lost.remedy is not None and lost.recipe is not None:
        yield el("p", "The most for its bytes, as lines for the recipe:")
        yield el("pre", ((line, Html("\n")) for line in recipe_lines(lost.remedy, 200)))


def _experts(lost: Losses) -> bool:
    """Return whether a layer has several products of one role."""
    places = [(each.layer, each.role) for each in lost.products if each.layer is not None]
    return len(set(places)) < len(places)


def _roles(lost: Losses) -> list[str]:
    return list(dict.fromkeys(each.role for each in lost.products if each.layer is not None))


def _kurtosis(spread: Spread | None) -> float | None:
    return None if spread is None else spread.kurtosis


_Figure = Callable[[ProductLoss], float | None]


def _maps(lost: Losses, maps: tuple[tuple[str, _Figure], ...], form: str) -> Html:
    """Return heat maps of layers and roles side by side, shaded alike."""
    known = [value for _, figure in maps for each in lost.products if (value := figure(each)) is not None]
    largest = max(known, default=0.0)
    figures = (el("figure", el("figcaption", title), _heat(lost, figure, form, largest)) for title, figure in maps)
    return el("div", figures, class_="pair")


def _heat(lost: Losses, figure: _Figure, form: str, largest: float) -> Html:
    roles = _roles(lost)
    layers = sorted({each.layer for each in lost.products if each.layer is not None})
    known: dict[tuple[int | None, str], list[float]] = {}
    for each in lost.products:
        if (value := figure(each)) is not None:
            known.setdefault((each.layer, each.role), []).append(value)
    outside = {each.role: each for each in lost.products if each.layer is None}.values()

    def cell(layer: int | None, role: str) -> Html:
        values = known.get((layer, role))
        if values is None:
            return el("td")
        where = role if layer is None else f"layer {layer}, {role}"
        many = f", the worst of {len(values)}" if len(values) > 1 else ""
        said = form.format(max(values))
        return el("td", said.rstrip("%"), style=shade(max(values), largest), title=f"{where}{many}: {said}")

    head = el("tr", el("th", "layer"), (el("th", role, scope="col") for role in roles))
    body = [el("tr", el("th", layer, scope="row"), (cell(layer, role) for role in roles)) for layer in layers]
    for each in outside:
        body.append(el("tr", el("th", each.role, scope="row"), cell(None, each.role)))
    return el("div", el("table", el("thead", head), el("tbody", body), class_="heat"), class_="scroll")
