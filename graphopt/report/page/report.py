"""Puts a page together: its parts, its style, its script, its data, in one file that needs nothing else."""

from __future__ import annotations

from importlib import resources
from typing import TYPE_CHECKING

from graphopt.report.page import sections
from graphopt.report.page.data import page_data
from graphopt.report.page.difference import difference_section
from graphopt.report.page.html import Html, el, section
from graphopt.report.page.losses import quality_section
from graphopt.report.page.times import time_section
from graphopt.report.query import KEYS
from graphopt.version import VERSION

if TYPE_CHECKING:
    from graphopt.artifact.manifest import Manifest
    from graphopt.inference.profiling import Profile
    from graphopt.quality.losses import Losses
    from graphopt.report.trace import Diff, Trace

# Nothing is loaded, from the network or the disk: not even by a name in the model that were taken for markup.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; base-uri 'none'"
# A served page asks its server, and no other, whether the model has changed.
_LIVE = "; connect-src 'self'"

_TITLES = {
    "verdict": "Verdict",
    "passes": "Passes",
    "graph": "Layers",
    "size": "Size",
    "diff": "Difference",
    "quality": "Quality",
    "time": "Time",
    "nodes": "Nodes",
}


def report(
    trace: Trace,
    manifest: Manifest | None = None,
    difference: Diff | None = None,
    losses: Losses | None = None,
    measurement: Profile | None = None,
    *,
    live: bool = False,
) -> str:
    """Return a page about a model, in HTML.

    It holds no weight and no text that the model read; histograms of weights only where ``losses`` has them.

    Args:
        trace: what the model consists of.
        manifest: how it came to be.
        difference: what is different from the model that it was made from.
        losses: where quality was lost.
        measurement: where its time goes.
        live: whether the page is served, and loads itself again when the model changes.
    """
    parts = [
        sections.verdict(trace, manifest, difference, losses, measurement),
        sections.passes(trace, manifest, difference),
        sections.layers(trace),
        sections.size(trace),
        difference_section(difference),
        quality_section(losses),
        None if measurement is None else time_section(trace, measurement),
        _nodes(),
    ]
    parts_shown = [part for part in parts if part is not None]
    names = [name for name in _TITLES if any(_has_id(part, name) for part in parts_shown)]
    links = (el("a", _TITLES[name], href=f"#{name}") for name in names)
    head = el("header", el("h1", trace.model), el("nav", links, aria_label="parts of this page"))
    foot = el("footer", f"graphopt {VERSION}; {trace.format}; {len(trace.nodes):,} nodes")
    drawer = el("aside", id="drawer", hidden="", tabindex="-1", aria_label="node", aria_live="polite")
    content = page_data(trace, difference, losses, _shares(measurement))
    data = Html(f'<script type="application/json" id="data">{content}</script>')
    assets = ("report.js", "edits.js", "graph.js", "start.js", *(["live.js"] if live else []))
    script = Html(f"<script>{''.join(map(_asset, assets))}</script>")
    policy = Html(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}{_LIVE if live else ""}">')
    meta = [
        Html('<meta charset="utf-8">'),
        policy,
        Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        el("title", f"{trace.model} - graphopt"),
        Html(f"<style>{_asset('report.css')}</style>"),
    ]
    body = el("body", head, el("main", parts_shown), drawer, foot, data, script)
    return "<!doctype html>\n" + el("html", el("head", meta), body, lang="en")


def _shares(measurement: Profile | None) -> dict[str, float]:
    """Return the share of each node in the time of one token, or of a prompt."""
    run = None if measurement is None else measurement.token or measurement.prompt
    return {} if run is None else {name: seconds / run.seconds for name, seconds in run.nodes.items()}


def _has_id(part: Html, name: str) -> bool:
    return part.startswith("<section") and f' id="{name}">' in part[: part.index(">") + 1]


def _nodes() -> Html:
    attributes = {"aria_label": "query", "autocomplete": "off", "spellcheck": "false"}
    field = el("input", type="search", id="query", placeholder="role:down_proj layer:0-3", **attributes)
    keys = f"keys are {', '.join(KEYS)}"
    hint = el("p", f"All terms must hold; {keys}; a word without a colon is looked for in names.", class_="note")
    link = el("button", "copy a link to this view", type="button", data_copy="")
    counter = el("p", el("span", id="count", role="status"), " ", link)
    node_list = el("div", el("table", el("thead"), el("tbody"), id="list"), class_="scroll tall")
    return section("nodes", "Nodes", field, hint, counter, node_list)


def _asset(name: str) -> str:
    return (resources.files(__package__) / name).read_text(encoding="utf-8")
