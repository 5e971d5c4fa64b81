"""The page about a model: one file that opens from disk, finds nodes as `inspect` does, and shows names as text."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from html.parser import HTMLParser
from pathlib import Path

import onnx_ir as ir
import pytest
from typer.testing import CliRunner

from graphopt.cli import app
from graphopt.compile.pipeline import optimize
from graphopt.errors import InputError
from graphopt.quality.groups import Group, Remainder
from graphopt.quality.losses import Losses, ProductLoss
from graphopt.quality.spread import Spread
from graphopt.report.difference import diff_of
from graphopt.report.page import report
from graphopt.report.page.write import PageOptions, write
from graphopt.report.query import select_nodes, selector
from graphopt.report.trace import Trace
from graphopt.report.trace_builder import trace_of
from tests.analysis.structure.folding.test_folding import mixed_precision
from tests.decoders import decoder
from tests.graphs import run_pass
from tests.report.difference.test_diff import nodes_by_name, plant
from tests.report.test_summary import vision

HOSTILE = [
    "</script><script>document.body.dataset.hacked = 1</script>",
    '"><img src=x onerror="document.body.dataset.hacked = 1">',
    "<!--<script>",
    "a\nb\x00\x1b[2J\u2028\u202e",
    "x" * 10_000,
    "{{7*7}} ${1} \\u003c &lt;",
]


class Page(HTMLParser):
    """What a browser would see: elements with their attributes, and the text outside of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.scripts, self._inside = "", [""], ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside = tag if tag in ("script", "style") else self._inside
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = "" if tag == self._inside else self._inside

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif not self._inside:
            self.text += data

    @property
    def data(self) -> dict[str, list[list[object]]]:
        columns: dict[str, list[list[object]]] = json.loads(self.scripts[1])
        return columns


def trace_model(model: ir.Model, name: str = "m") -> Trace:
    return trace_of(model, None, name)


def losses_of(model: ir.Model) -> Losses:
    """Return errors for each product of a decoder, as they might be."""
    products = [
        ProductLoss(
            node=node.name,
            role=node.role,
            layer=node.layer,
            local=0.01,
            accumulated=0.1,
            first_token=0,
            bytes=9,
            read=Spread(kurtosis=3, largest=4),
            read_before=Spread(kurtosis=30, largest=40),
        )
        for node in trace_model(model).nodes
        if node.role.endswith("_proj") and node.weights
    ]
    groups = [
        Group(what="layers", layers=[0], kl=0.01, only=0.02, bytes=5),
        Group(what="role", role="up_proj", kl=0, only=0.03, bytes=1),
    ]
    remainder = Remainder(kinds=0.03, rest=0.002, together=0.008)
    return Losses(tokens=7, kl=0.04, products=products, groups=groups, remainder=remainder)


def test_a_page_needs_nothing_else() -> None:
    model = decoder(3)
    page = Page(report(trace_model(model), None, None, losses_of(model)))
    assert not [tag for tag, _ in page.elements if tag in ("link", "img", "iframe", "object", "base")]
    assert not [
        name for _, attributes in page.elements for name in attributes if name == "src" or name.startswith("on")
    ]
    assert all(
        attributes["href"].startswith("#") for tag, attributes in page.elements if tag == "a" and attributes["href"]
    )
    (policy,) = [attributes["content"] for tag, attributes in page.elements if attributes.get("http-equiv")]
    assert policy is not None
    assert "default-src 'none'" in policy
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    targets = {attributes["href"] for tag, attributes in page.elements if tag == "a"}
    assert {"#verdict", "#graph", "#size", "#quality", "#nodes"} <= targets
    assert {target[1:] for target in targets if target and "=" not in target} <= set(ids)
    assert "0.0400 nats" in page.text
    assert "+0.0080 of 0.0400 do not add up" in page.text


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_text(name: str) -> None:
    before, model = decoder(2), decoder(2)
    plant(model, "attribute", 1)
    plain_page = Page(report(trace_model(model), None, diff_of((before, None), (model, None)), losses_of(model)))
    nodes_by_name(model)["attention1"].name = name
    nodes_by_name(model)["up0"].name = name + "2"
    model.graph.initializers["down0.weight"].name = name + "3"
    text = report(
        trace_model(model, name), None, diff_of((before, None), (model, None), (name, name)), losses_of(model)
    )
    page = Page(text)
    # the same elements with the same attributes, whatever the names are
    count = lambda html: sum(tag == "script" for tag, _ in html.elements)  # noqa: E731
    assert count(page) == count(plain_page) == 2
    assert not [
        tag for tag, attributes in page.elements if tag == "img" or any(key.startswith("on") for key in attributes)
    ]
    assert {tag for tag, _ in page.elements} == {tag for tag, _ in plain_page.elements}
    assert page.scripts[2] == plain_page.scripts[2]
    words = page.data["words"]
    assert any(name[:3000] in str(word) for word in words)
    # names are in the page a few times each: it does not grow with the square of a name
    assert len(text) < 2 * len(report(trace_model(model))) + 100_000
    assert "\x00" not in text
    assert "\x1b" not in page.text


QUERIES = [
    "",
    "op:MatMul role:down_proj format:int4 layer:0-3",
    "role:gate_proj,up_proj layer:5,1",
    "format:float32 role:*_proj",
    "attention3",
    "op:RMS* layer:2",
    "layer:9",
    "name:'down[12]'",
    "name:down[!12] op:Mat?ul",
    "weight:down*.codes",
    '"up5"',
    "runner:onnxruntime computes:float32",
    "role:(.*)",
    "pass:*",
    "name:*",
]


def test_the_page_finds_what_inspect_finds(tmp_path: Path) -> None:
    # the page's script is JavaScript, and node is no package of PyPI
    node = shutil.which("node") or pytest.skip("there is no node to run the page's script")
    model_trace = trace_model(mixed_precision())
    page = Page(report(model_trace))
    script, _, _ = page.scripts[2].partition("function make(")
    head = f"""
        const json = {json.dumps(page.scripts[1])};
        globalThis.window = {{ addEventListener() {{}} }};
        globalThis.document = {{ getElementById: () => ({{ textContent: json }}) }};
    """
    tail = f"""
        const ask = query => {{
          try {{ return nodes.filter(selector(query)).map(n => n.place); }} catch (e) {{ return "error"; }}
        }};
        console.log(JSON.stringify({json.dumps([*QUERIES, *WRONG])}.map(ask)));
    """
    (tmp_path / "page.js").write_text(head + script + tail)
    process = subprocess.run([node, tmp_path / "page.js"], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    answers = json.loads(process.stdout)
    index_by_id = {id(trace_node): index for index, trace_node in enumerate(model_trace.nodes)}
    for query, answer in zip(QUERIES, answers[: len(QUERIES)], strict=True):
        assert answer == [index_by_id[id(trace_node)] for trace_node in select_nodes(model_trace, query).nodes], query
    assert answers[len(QUERIES) :] == ["error"] * len(WRONG)
    for query in WRONG:
        with pytest.raises(InputError):
            selector(model_trace, query)


WRONG = ["colour:red", "layer:first", "layer:1-", "name:'open"]


def test_an_artifact_says_what_each_pass_did(llama_artifact: Path, tmp_path: Path) -> None:
    optimize(llama_artifact, "rotate-int4-rtn", tmp_path / "made", run=False)
    write(tmp_path / "made", tmp_path / "page.html", before=llama_artifact)
    page = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    for word in ("fold_norms", "rotate", "quantize_weights", "proved", "What it left, and why", "before", "int4 by 32"):
        assert word in page.text, word
    assert "\\n" not in page.text
    assert "y = MatMul(" in page.text
    boxes = [
        attributes
        for _, attributes in page.elements
        if attributes.get("class", "") and "box" in str(attributes["class"]).split()
    ]
    assert len(boxes) > 20
    names = page.data["words"]
    assert any("down_proj" in str(name) for name in names)


def test_any_model_has_a_page(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(vision(tmp_path)), "-o", str(tmp_path / "page.html")])
    assert result.exit_code == 0
    page = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert "there is no manifest" in page.text
    x = ir.val("x", ir.DataType.FLOAT, [1])
    empty = ir.Model(ir.Graph([x], [x], nodes=[], opset_imports={"": 23}, name="empty"), ir_version=10)
    assert "no repeated layers" in Page(report(trace_model(empty))).text
    with pytest.raises(InputError, match="--before"):
        write(tmp_path / "vision.onnx", tmp_path / "page.html", options=PageOptions(locate_losses=True))
    with pytest.raises(InputError, match="cannot be written"):
        write(tmp_path / "vision.onnx", tmp_path / "nowhere" / "page.html")


def test_many_nodes_are_a_small_page() -> None:
    model = decoder(100)
    run_pass(model, "quantize_weights", linear={"format": "int4", "group": 16})
    start = time.process_time()
    text = report(trace_model(model))
    # 8,000 nodes may take 10 MB and 10 s; a third of these a third of the bytes, and the drawing is of one layer
    assert len(text) < 1e7 / 3
    assert time.process_time() - start < 10
    assert len(Page(text).data["nodes"]) == len(list(model.graph))
