"""What `graphopt inspect` says of a model: figures that can be worked out by hand, of any model that opens."""

from __future__ import annotations

import io
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from rich.console import Console

from graphopt.analysis.structure.cost import weight_totals
from graphopt.artifact.hf_config import ModelFacts
from graphopt.artifact.manifest import Manifest, Source
from graphopt.compile.pipeline import optimize
from graphopt.errors import InputError
from graphopt.report import escape
from graphopt.report.difference import diff
from graphopt.report.escape import plain, ranges
from graphopt.report.query import mismatch, select_nodes, selector
from graphopt.report.summary import coverage_table, heading, left_table, roles_table, rows
from graphopt.report.trace import Trace
from graphopt.report.trace_builder import BYTES, OPERATIONS, trace, trace_of
from tests.analysis.structure.folding.test_folding import mixed_precision
from tests.decoders import GROUPS, HEAD, HEADS, INNER, VOCABULARY, WIDTH, decoder
from tests.graphs import run_pass, save


def trace_model(model: ir.Model, context: int = 100) -> Trace:
    return trace_of(model, None, "m", context)


def figure(model_trace: Trace, name: str, metric: str) -> float:
    (value,) = [
        measure.value for measure in model_trace.measures if (measure.subject, measure.metric) == (name, metric)
    ]
    return value


def text_of_trace(model_trace: Trace, query: str = "", width: int = 200) -> str:
    console = Console(file=io.StringIO(), width=width)
    for line in heading(model_trace):
        console.print(line, markup=False, soft_wrap=True)
    selection = selector(model_trace, query)
    for table in (
        roles_table(model_trace, selection),
        coverage_table(model_trace, selection),
        left_table(model_trace, selection),
    ):
        if table is not None:
            console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_layers_of_one_structure_are_one_row() -> None:
    model_trace = trace_model(decoder(32))
    assert model_trace.folds[0].layers == list(range(32))
    by_role = {row.role: row for row in rows(model_trace) if row.fold == 0}
    assert by_role["down_proj"].nodes == 32
    assert by_role["down_proj"].parameters == 32 * INNER * WIDTH
    text = text_of_trace(model_trace)
    assert "32 layers: (A) x 32" in text
    assert len([line for line in text.splitlines() if "down_proj" in line]) == 1


def test_alternating_layers_are_nested() -> None:
    model_trace = trace_model(decoder([*(["local"] * 5 + ["global"]) * 2, "local"]))
    assert [fold.layers for fold in model_trace.folds] == [[0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 12], [5, 11]]
    assert "13 layers: ((A) x 5, B) x 2, A" in text_of_trace(model_trace)


def test_mixed_precision_is_one_row_with_its_exceptions() -> None:
    model_trace = trace_model(mixed_precision())
    assert model_trace.folds[0].exceptions == [1, 4, 5]
    text = text_of_trace(model_trace)
    (down,) = [row for row in rows(model_trace) if row.role == "down_proj"]
    assert down.formats == {"int4 by 16": 4, "int8 by 16": 2}
    assert down.odd == {"int8 by 16": [1, 4]}
    assert "4 x int4 by 16, 2 x int8 by 16" in text
    assert "int8 by 16 in 1, 4" in text
    (up,) = [row for row in rows(model_trace) if row.role == "up_proj"]
    assert up.odd == {"float32": [5]}


def test_figures_per_token() -> None:
    model_trace = trace_model(decoder(2), context=100)
    assert figure(model_trace, "down0", OPERATIONS) == 2 * INNER * WIDTH
    assert figure(model_trace, "down0", BYTES) == 4 * INNER * WIDTH
    # each of 4 query heads multiplies keys and values of 100 tokens; the cache has 2 heads of floats
    assert figure(model_trace, "attention1", OPERATIONS) == 4 * HEADS * HEAD * 100
    assert figure(model_trace, "attention1", BYTES) == 2 * GROUPS * HEAD * 100 * 4
    # a lookup reads one row
    assert figure(model_trace, "embedding", BYTES) == 4 * WIDTH
    assert figure(model_trace, "head", BYTES) == 4 * WIDTH * VOCABULARY


def test_codes_are_read_with_their_scales() -> None:
    model = decoder(2)
    run_pass(model, "quantize_weights", linear={"format": "int4", "group": 16})
    model_trace = trace_model(model)
    scales = 4 * (INNER // 16) * WIDTH
    assert figure(model_trace, "down0", BYTES) == INNER * WIDTH / 2 + scales
    totals = weight_totals(model)
    assert sum(row.parameters for row in rows(model_trace)) == totals.parameters
    assert sum(row.bytes for row in rows(model_trace)) == totals.bytes


def test_queries() -> None:
    model_trace = trace_model(mixed_precision())
    names = lambda query: [node.name for node in select_nodes(model_trace, query).nodes]  # noqa: E731
    assert names("op:MatMul role:down_proj format:int4 layer:0-3") == ["down0", "down2", "down3"]
    assert (
        names("role:gate_proj,up_proj layer:5,1") == ["gate1", "up1", "gate5", "up5"]
        or len(names("role:gate_proj,up_proj layer:5,1 op:MatMul")) == 4
    )
    assert names("format:float32 role:*_proj") == ["up5"]
    assert names("attention3") == ["attention3"]
    assert names("op:RMS* layer:2") == ["input_norm2", "mlp_norm2"]
    assert names("role:down_proj layer:9") == []
    selection = select_nodes(model_trace, "attention3")
    assert {measure.subject for measure in selection.measures} == {"attention3"}
    assert Trace.model_validate_json(selection.model_dump_json()) == selection


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("role:down_prj layer:0-3", "no node matches role:down_prj; there are attention, down_proj, embedding"),
        ("pass:rotate", "no node matches pass:rotate"),
        ("role:down_proj op:Softmax", "no node matches op:Softmax"),
        ("role:down_proj layer:1 format:int8 layer:2", "but no node matches all of them"),
        ("'a b'", "no node matches a b"),
        ("role:down_proj", None),
    ],
)
def test_a_query_that_means_nothing_says_what_there_is(query: str, message: str | None) -> None:
    remark = mismatch(trace_model(mixed_precision()), query)
    assert remark is None if message is None else remark is not None and message in remark


@pytest.mark.parametrize("query", ["colour:red", "layer:first", "layer:1-", "name:'open"])
def test_a_query_that_cannot_be_read_says_what_can_be(query: str) -> None:
    with pytest.raises(InputError, match="query|layer"):
        selector(trace_model(decoder(1)), query)


def test_an_artifact_says_what_each_pass_touched_and_left(llama_artifact: Path, tmp_path: Path) -> None:
    result = optimize(llama_artifact, "rotate-int4-rtn", tmp_path / "made", run=False)
    model_trace = trace(tmp_path / "made")
    assert [stage.name for stage in model_trace.stages] == [report.name for report in result.manifest.passes]
    by_role = {row.role: row for row in rows(model_trace) if row.fold == 0}
    assert {"rotate": 2, "quantize_weights": 2}.items() <= by_role["down_proj"].passes.items()
    assert by_role["gate_proj"].passes["fold_norms"] == 2
    assert {node.runner for node in model_trace.nodes} == {"onnxruntime"}
    text = text_of_trace(model_trace)
    assert "2/2" in text
    reasons = [line for line in text.splitlines() if "RotaryEmbedding turns each pair" in line]
    assert 0 < len(reasons) <= 3
    products = [node for node in model_trace.nodes if node.role == "down_proj" and node.weights]
    assert [model_trace.weights[node.weights[0]].format for node in products] == ["int4", "int4"]


def vision(folder: Path) -> Path:
    """Write a small network of convolutions as another exporter would: no tokens, no layers that repeat by name."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 17]>
        vision (float[n, 3, 16, 16] image) => (float[n, 10] classes)
        <float[8, 3, 3, 3] k0, float[8, 8, 3, 3] k1, float[8, 8, 3, 3] k2, float[8, 10] w> {
           a = Conv<pads = [1, 1, 1, 1]>(image, k0)
           b = Relu(a)
           c = Conv<pads = [1, 1, 1, 1]>(b, k1)
           d = Relu(c)
           e = Conv<pads = [1, 1, 1, 1]>(d, k2)
           f = Relu(e)
           g = GlobalAveragePool(f)
           h = Flatten(g)
           classes = MatMul(h, w)
        }"""
    )
    random = np.random.default_rng(0)
    for name, shape in (("k0", (8, 3, 3, 3)), ("k1", (8, 8, 3, 3)), ("k2", (8, 8, 3, 3)), ("w", (8, 10))):
        array = random.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    onnx.save(model, folder / "vision.onnx")
    return folder / "vision.onnx"


def test_a_vision_model_opens_with_less_to_say(tmp_path: Path) -> None:
    model_trace = trace(vision(tmp_path))
    assert Counter(node.role for node in model_trace.nodes)["conv"] == 3
    assert any("no manifest" in note for note in model_trace.notes)
    assert sum(row.parameters for row in rows(model_trace)) == 8 * 27 + 2 * 8 * 72 + 80
    # the second and the third convolution are alike, with their Relu
    assert model_trace.folds[0].layers == [0, 1]
    text_of_trace(model_trace)


def test_a_graph_that_onnxruntime_optimized_opens(llama_artifact: Path, tmp_path: Path) -> None:
    from graphopt.ort.session import open_session

    open_session(llama_artifact / "model.onnx", optimized_to=tmp_path / "fused.onnx")
    shutil.copy(llama_artifact / "model.onnx.data", tmp_path)
    model_trace = trace(tmp_path / "fused.onnx")
    assert sum(len(fold.layers) for fold in model_trace.folds) == 2
    assert {"attention", "q_proj", "down_proj", "lm_head"} <= {node.role for node in model_trace.nodes}


def test_a_graph_without_nodes_opens() -> None:
    x = ir.val("x", ir.DataType.FLOAT, [1])
    model = ir.Model(ir.Graph([x], [x], nodes=[], opset_imports={"": 23}, name="empty"), ir_version=10)
    assert trace_model(model).nodes == []
    text_of_trace(trace_model(model))


HOSTILE = ["</script><b>", "[red]bold[/red]", "two\nlines", "x" * 10_000, "\x1b[31m", "[/]", "a\u202eb"]


def test_hostile_names_are_text(tmp_path: Path) -> None:
    model = decoder(len(HOSTILE))
    nodes = {node.name: node for node in model.graph}
    for number, name in enumerate(HOSTILE):
        nodes[f"down{number}"].name = name
        weight = nodes[f"down{number}"].inputs[1]
        assert weight is not None
        model.graph.initializers.pop(weight.name or "")
        weight.name = f"{name}.weight"
        model.graph.initializers[weight.name] = weight
    model_trace = trace(save(model, tmp_path))
    assert [node.name for node in select_nodes(model_trace, "role:down_proj").nodes] == HOSTILE
    text = text_of_trace(model_trace)
    assert f"{len(HOSTILE)} layers: (A) x {len(HOSTILE)}" in text
    assert "\x1b" not in text
    for name in HOSTILE:
        line = plain(name)
        assert line.isprintable()
        assert len(line) <= escape.WIDTH
    assert plain("two\nlines") == "two\\nlines"
    assert Trace.model_validate_json(model_trace.model_dump_json()) == model_trace


def test_what_is_no_model_says_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no ONNX model"):
        trace(tmp_path)
    (tmp_path / "model.onnx").write_bytes(b"nothing")
    with pytest.raises(InputError):
        trace(tmp_path)


def test_numbers_are_shown_as_ranges() -> None:
    assert ranges([3, 0, 1, 2, 7, 9, 8]) == "0-3, 7-9"
    assert ranges([]) == ""
    assert ranges([5]) == "5"


def test_a_manifest_of_no_passes_has_no_coverage() -> None:
    manifest = Manifest(source=Source(kind="onnx", name="m"), model=ModelFacts())
    assert coverage_table(trace_of(decoder(1), manifest, "m")) is None


@pytest.mark.parametrize(("preset", "target"), [("rotate-int4-rtn", None), ("fp6-rtn", "ort-cpu:avx512")])
def test_a_model_without_its_weights_opens(
    llama_artifact: Path, tmp_path: Path, preset: str, target: str | None
) -> None:
    optimize(llama_artifact, preset, tmp_path / "made", run=False, target=target)  # type: ignore[arg-type]
    whole = trace(tmp_path / "made")
    (tmp_path / "made" / "model.onnx.data").unlink()
    model_trace = trace(tmp_path / "made")
    assert any("weights is missing" in note for note in model_trace.notes)
    assert [note for note in model_trace.notes if "weights is missing" not in note] == whole.notes
    assert model_trace.nodes == whole.nodes
    assert model_trace.folds == whole.folds
    assert [weight.shape for weight in model_trace.weights] == [weight.shape for weight in whole.weights]
    assert model_trace.totals() == whole.totals()
    text_of_trace(model_trace)
    with pytest.raises(InputError, match="external data is missing"):
        diff(llama_artifact, tmp_path / "made")
