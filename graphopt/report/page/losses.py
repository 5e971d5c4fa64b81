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


def quality_section(losses: Losses | None) -> Html | None:
    """Return errors of products as heat maps and curves, outliers, and what groups of products do to the whole."""
    if losses is None or not losses.products:
        return None
    parts: list[object] = [
        el(
            "p",
            f"Errors are in percent of what a product makes in floats, on {losses.tokens:,} tokens of text. "
            "Alone: with inputs of the float model, so it is the product's own error. "
            "Inside: in the compressed model, behind all errors before it. "
            "First token: that of each text, inside; the others leave it out, for its numbers are often huge."
            + (" Of experts the worst of a layer is shown." if _experts(losses) else ""),
        ),
        el(
            "div",
            _maps(
                losses,
                (("Alone", lambda product: product.local), ("Inside", lambda product: product.accumulated)),
                "{:.1%}",
            ),
            _maps(losses, (("First token", lambda product: product.first_token),), "{:.1%}"),
            class_="pair",
        ),
    ]
    charts = [product for role in _roles(losses) if (product := curves(losses.products, role)) is not None]
    if charts:
        legend = el("p", el("i", class_="key alone"), "alone ", el("i", class_="key inside"), "inside", class_="note")
        parts += [el("h3", "From layer to layer"), legend, el("div", charts, class_="charts")]
    parts += _groups(losses)
    if any(product.read is not None for product in losses.products):
        parts += [
            el("h3", "Outliers of what products read"),
            el("p", "Kurtosis: 3 for a normal distribution, more where few numbers are large.", class_="note"),
            _maps(
                losses,
                (
                    ("In the model before", lambda product: _kurtosis(product.read_before)),
                    ("Behind folded norms and rotations", lambda product: _kurtosis(product.read)),
                ),
                "{:.1f}",
            ),
        ]
    if losses.histograms:
        parts += [
            el("h3", "Weights among the levels of their format"),
            el(
                "p",
                "Of each kind the product that errs most by itself. Bars: numbers of the float model, in units of the "
                "scales. Lines: the levels of the format; a dot says how often the level is used.",
                class_="note",
            ),
            el("div", (histogram_chart(product) for product in losses.histograms), class_="charts"),
        ]
    return section("quality", "Where quality was lost", parts)


def _groups(losses: Losses) -> Iterator[object]:
    if losses.kl is None:
        return
    kl = losses.kl or 1.0
    lines = (
        (
            group_name(group),
            bar((group.only or 0.0) / kl, f"{group.only:.4f}") if group.only is not None else "",
            bar(group.kl / kl, f"{group.kl:.4f}"),
            f"{round((losses.kl - group.kl) / kl, 2) + 0.0:.0%}",
            size_text(group.bytes),
        )
        for group in losses.groups
    )
    yield el("h3", "Which products cause it")
    yield el("p", f"The divergence from the float model is {losses.kl:.4f} nats per token. Groups of layers are halved "
             "where they matter.", class_="note")  # fmt: skip
    head = ("group", "only it is quantized", "all but it is quantized", "comes back", "costs in floats")
    yield table(head, lines, right=(3, 4))
    if losses.remainder is not None:
        text = remainder(losses)
        yield el("p", text[0].upper() + text[1:] + ".")
    if losses.remedy is not None and losses.recipe is not None:
        yield el("p", "The most for its bytes, as lines for the recipe:")
        yield el("pre", ((line, Html("\n")) for line in recipe_lines(losses.remedy, 200)))


def _experts(losses: Losses) -> bool:
    """Return whether a layer has several products of one role."""
    pairs = [(product.layer, product.role) for product in losses.products if product.layer is not None]
    return len(set(pairs)) < len(pairs)


def _roles(losses: Losses) -> list[str]:
    return list(dict.fromkeys(product.role for product in losses.products if product.layer is not None))


def _kurtosis(spread: Spread | None) -> float | None:
    return None if spread is None else spread.kurtosis


_Figure = Callable[[ProductLoss], float | None]


def _maps(losses: Losses, maps: tuple[tuple[str, _Figure], ...], form: str) -> Html:
    """Return heat maps of layers and roles side by side, shaded alike."""
    values_known = [
        value for _, figure in maps for product in losses.products if (value := figure(product)) is not None
    ]
    largest = max(values_known, default=0.0)
    figures = (el("figure", el("figcaption", title), _heat(losses, figure, form, largest)) for title, figure in maps)
    return el("div", figures, class_="pair")


def _heat(losses: Losses, figure: _Figure, form: str, largest: float) -> Html:
    roles = _roles(losses)
    layers = sorted({product.layer for product in losses.products if product.layer is not None})
    values_of: dict[tuple[int | None, str], list[float]] = {}
    for product in losses.products:
        if (value := figure(product)) is not None:
            values_of.setdefault((product.layer, product.role), []).append(value)
    outside = {product.role: product for product in losses.products if product.layer is None}.values()

    def cell(layer: int | None, role: str) -> Html:
        values = values_of.get((layer, role))
        if values is None:
            return el("td")
        label = role if layer is None else f"layer {layer}, {role}"
        count_text = f", the worst of {len(values)}" if len(values) > 1 else ""
        text = form.format(max(values))
        return el("td", text.rstrip("%"), style=shade(max(values), largest), title=f"{label}{count_text}: {text}")

    head = el("tr", el("th", "layer"), (el("th", role, scope="col") for role in roles))
    body = [el("tr", el("th", layer, scope="row"), (cell(layer, role) for role in roles)) for layer in layers]
    for product in outside:
        body.append(el("tr", el("th", product.role, scope="row"), cell(None, product.role)))
    return el("div", el("table", el("thead", head), el("tbody", body), class_="heat"), class_="scroll")
