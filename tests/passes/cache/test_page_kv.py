from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from graphopt.analysis.structure.paged_caches import kv_nodes, layer_of, layers_of
from graphopt.artifact import artifact
from graphopt.compile.pipeline import optimize
from graphopt.graph.editing import Inserter, bypass, clone_node, name_output, shared_constant, take_place
from graphopt.graph.weights import new_weight
from graphopt.inference.decoding.decoder import Decoder
from graphopt.inference.session import load
from graphopt.passes.common.paging import attention
from graphopt.passes.context import make_context
from graphopt.passes.recipe import Recipe
from graphopt.passes.registry import PASSES
from graphopt.tasks import task_of
from graphopt.tasks.causal_lm.interface import Interface
from tests.decoders import decoder
from tests.families import VOCABULARY
from tests.graphs import canonical, relative, run_pass, session

MakeArtifact = Callable[[str], Path]

# Relative to the largest logit. Scores and values are summed in another order, in float32, in two layers: seen 2e-7 to
# 8e-7. Reading one token too many or too few moves logits by more than 1e-2.
FLOAT32 = 1e-5

# Families that canonicalize leaves with standard Attention, and the windows of their layers.
WINDOWS = dict.fromkeys(("llama", "qwen2", "gpt2", "gpt_neox", "phi3", "mixtral"), (0, 0))
WINDOWS |= {"gpt_oss": (6,), "gemma3": (6, 0), "mistral_window": (6,), "qwen3": (0,), "falcon_new": (0,)}
# of two layers the second reads the keys and values of the first
WINDOWS |= {"gemma3n": (0, 0)}
# heads of 16 in the first layer, of 32 in the others
WINDOWS |= {"gemma4": (6, 0, 0)}
# chunks in the first
WINDOWS |= {"llama4": (8, 0)}


def logits_by_calls(
    opened: onnxruntime.InferenceSession, calls: list[int], paddings: list[int], vocabulary: int = VOCABULARY
) -> np.ndarray:
    """Feed columns call by call, rows padded on the left; return the logits of all tokens."""
    interface = Interface.of_session(opened)
    length = sum(calls)
    ids = np.random.default_rng(0).integers(0, vocabulary, (len(paddings), length))
    mask = (np.arange(length) >= np.array(paddings)[:, None]).astype(np.int64)
    past, made, begin = interface.empty_past(len(paddings), length), [], 0
    for count in calls:
        end = begin + count
        feeds = interface.feeds(ids[:, begin:end], mask[:, :end], past)
        logits, *present = opened.run(["logits", *interface.present], feeds)
        past = dict(zip(interface.past, present, strict=True))
        made.append(logits)
        begin = end
    return np.concatenate(made, axis=1)[mask.astype(bool)]


@pytest.mark.parametrize("family", WINDOWS)
def test_logits_stay_in_prefill_and_decode_and_ragged_batches(
    family: str, make_artifact: MakeArtifact, tmp_path: Path
) -> None:
    model = canonical(make_artifact(family))
    before = session(model, tmp_path / "before")
    report = run_pass(model, "page_kv", page=16)
    assert not report.skips
    assert tuple(layer.attributes.window for layer in layers_of(model.graph)) == WINDOWS[family]
    assert [layer.attributes.chunks for layer in layers_of(model.graph)].count(1) == (family == "llama4")
    assert "attention_mask" not in [value.name for value in model.graph.inputs]
    after = session(model, tmp_path / "after")
    # a prefill; single tokens across the end of a page; pieces; rows that are mostly padding
    for calls, paddings in (([40], [0]), ([14, 1, 1, 1, 1], [0]), ([5, 20, 1, 9], [0, 11, 24, 3])):
        expected, found = (logits_by_calls(opened, calls, paddings) for opened in (before, after))
        assert relative(expected, found) < FLOAT32


@pytest.mark.parametrize(("family", "layer"), [("qwen3_next", 1), ("falcon_h1", 0)])
def test_recurrences_read_what_lengths_say(
    family: str, layer: int, make_artifact: MakeArtifact, tmp_path: Path
) -> None:
    model = canonical(make_artifact(family))
    before = session(model, tmp_path / "before")
    report = run_pass(model, "page_kv", page=16)
    assert not report.skips
    names = [value.name for value in model.graph.inputs]
    assert "attention_mask" not in names
    assert {"past_key_values.0.recurrent_state", f"past_key_values.{layer}.keys"} <= set(names)
    after = session(model, tmp_path / "after")
    for calls, paddings in (([14, 1, 1, 1], [0]), ([5, 20, 1, 9], [0, 11, 24, 3])):
        expected, logits = (logits_by_calls(opened, calls, paddings) for opened in (before, after))
        assert relative(expected, logits) < FLOAT32
    store = load(tmp_path / "after" / "model.onnx", threads=1)
    decoder, ids = Decoder(store, 1), np.random.default_rng(0).integers(0, VOCABULARY, (1, 24))
    decoder.step(ids[:, :20])
    mark = decoder.mark()
    decoder.step(ids[:, ::-1][:, :4])
    decoder.roll_back(mark, np.array([22]))
    assert decoder.tokens.tolist() == [20]
    assert relative(logits_by_calls(before, [24], [0])[-1], decoder.step(ids[:, 20:])[0, -1]) < FLOAT32


@pytest.mark.parametrize("storage", ["float32", "float16", "int8", "int4"])
def test_a_latent_is_stored_once(storage: str, make_artifact: MakeArtifact, tmp_path: Path) -> None:
    model = canonical(make_artifact("deepseek_v3"))
    before = session(model, tmp_path / "before")
    run_pass(model, "absorb_latent")
    assert not run_pass(model, "page_kv", page=16).skips
    if storage != "float32":
        assert not run_pass(model, "quantize_kv", storage=storage).skips
    (layer,) = layers_of(model.graph)
    assert (layer.head_size, layer.attributes.kv_heads, layer.attributes.value_size) == (48, 1, 32)
    names = [value.name for value in model.graph.inputs if str(value.name).startswith("past_key_values")]
    assert names == [f"past_key_values.0.{state}" for state in layer.states(1, 1)]
    assert "past_key_values.0.values" not in names
    after = session(model, tmp_path / "after")
    # codes of 48 numbers of a token, of which the newest pages stay floats
    bound = {"float32": FLOAT32, "float16": 1e-3, "int8": 0.01, "int4": 0.2}[storage]
    for calls, paddings in (([40], [0]), ([14, 1, 1, 1, 1], [0]), ([5, 20, 1, 9], [0, 11, 24, 3])):
        expected, logits = (logits_by_calls(opened, calls, paddings) for opened in (before, after))
        assert relative(expected, logits) < bound
    decoder = Decoder(load(tmp_path / "after" / "model.onnx", threads=1), 1)
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (1, 60))
    decoder.step(ids[:, :50])
    rows = decoder.fork([0, 0])
    decoder.save(tmp_path / "saved.safetensors")
    restored = Decoder.restore(load(tmp_path / "after" / "model.onnx", threads=1), tmp_path / "saved.safetensors")
    logits = decoder.step(ids[:, 50:])
    assert np.array_equal(logits, restored.step(ids[:, 50:]))
    assert relative(np.repeat(logits, 2, axis=0), rows.step(np.repeat(ids[:, 50:], 2, axis=0))) < FLOAT32
    decoder.rewind(50)
    assert relative(logits, decoder.step(ids[:, 50:])) < bound


def test_what_pages_of_latents_cannot_have(make_artifact: MakeArtifact) -> None:
    model = canonical(make_artifact("deepseek_v3"))
    run_pass(model, "absorb_latent")
    run_pass(model, "page_kv", page=16)
    for name, options, code in (
        ("sparse_kv", {"policy": "retrieval", "page": 16}, "sparse_kv.latent-pages"),
        ("sparse_kv", {"policy": "streaming", "compensate": 1, "page": 16}, "sparse_kv.latent-pages"),
        ("serve", {"block": 16}, "serve.stored-as"),
    ):
        report = run_pass(model, name, **options)
        assert code in {skip.reason.code for skip in report.skips}
        assert not report.changes
    assert run_pass(model, "sparse_kv", policy="streaming", sinks=4, recent=16, page=16).changes


def test_what_an_indexer_chooses_is_left_to_blocks(make_artifact: MakeArtifact) -> None:
    model = canonical(make_artifact("glm_moe_dsa"))
    run_pass(model, "absorb_latent")
    nodes = [node.op_type for node in model.graph]
    report = run_pass(model, "page_kv")
    assert {skip.reason.code for skip in report.skips} == {"page_kv.chooses"}
    assert [node.op_type for node in model.graph] == nodes


def test_rows_that_are_no_multiple_of_16_stay(make_artifact: MakeArtifact) -> None:
    model = canonical(make_artifact("deepseek_v3"))
    run_pass(model, "absorb_latent")
    for node in model.graph:
        if node.op_type == "Attention":
            key = node.inputs[1]
            assert key is not None
            rotary = key.producer().inputs[1].producer().inputs[1]
            rotary.shape = ir.Shape([*list(rotary.shape)[:3], 8])
            node.inputs[0].shape = ir.Shape([*list(node.inputs[0].shape)[:3], 40])
    report = run_pass(model, "page_kv", page=16)
    assert [str(skip.reason) for skip in report.skips] == [
        "its latent has 32 of 40 numbers, and KVAttention takes multiples of 16 up to 1280"
    ]


def test_a_mask_of_another_meaning_keeps_the_cache(make_artifact: MakeArtifact) -> None:
    model = canonical(make_artifact("qwen3_next"))
    node = next(node for node in model.graph if node.op_type == "CausalConv")
    mask = node.inputs[3]
    assert mask is not None
    flipped = ir.node("Sub", [new_weight(model.graph, "one", ir.tensor(np.array(1))), mask])
    flipped.outputs[0].name = "flipped"
    model.graph.insert_before(node, flipped)
    node.replace_input_with(3, flipped.outputs[0])
    report = run_pass(model, "page_kv")
    assert [skip.reason.code for skip in report.skips] == ["page_kv.other-mask"]
    assert "attention_mask" in [value.name for value in model.graph.inputs]


def test_transposes_around_heads_vanish(make_artifact: MakeArtifact) -> None:
    model = canonical(make_artifact("llama"))
    run_pass(model, "page_kv")
    counted = Counter(node.op_type for node in model.graph)
    assert counted["KVAttention"] == 2
    assert counted.keys().isdisjoint({"Attention", "Transpose", "Reshape", "Shape", "Concat", "Expand"})
    assert [value.name for value in model.graph.inputs][:4] == [
        *("input_ids", "position_ids", "past_length", "new_length"),
    ]
    assert {node.attributes.get_int("num_heads") for node in model.graph if node.op_type == "RotaryEmbedding"} == {4, 2}


def test_norms_of_heads_are_gone_through(make_artifact: MakeArtifact) -> None:
    model = canonical(make_artifact("gemma3"))
    run_pass(model, "page_kv")
    assert "Transpose" not in {node.op_type for node in model.graph}


def test_what_something_else_reads_stays_and_is_transposed(make_artifact: MakeArtifact, tmp_path: Path) -> None:
    model = canonical(make_artifact("llama"))
    attention = next(node for node in model.graph if node.op_type == "Attention")
    query, mixed = attention.inputs[0], attention.outputs[0]
    assert query is not None
    query.name, mixed.name = "query", "mixed"
    model.graph.outputs.extend([query, mixed])
    before = session(model, tmp_path / "before")
    run_pass(model, "page_kv")
    assert Counter(node.op_type for node in model.graph)["Transpose"] == 3
    after = session(model, tmp_path / "after")
    ids = np.arange(7)[None]
    results = []
    for opened in (before, after):
        interface = Interface.of_session(opened)
        feeds = interface.feeds(ids, np.ones_like(ids), interface.empty_past(1, 7))
        results.append(opened.run(["query", "mixed"], feeds))
    for expected, found in zip(*results, strict=True):
        assert expected.shape == found.shape
        assert relative(expected, found) < FLOAT32


def test_attention_on_rows_is_taken_as_it_is(make_artifact: MakeArtifact, tmp_path: Path) -> None:
    model = canonical(make_artifact("llama"))
    before = session(model, tmp_path / "before")
    for node in [node for node in model.graph if node.op_type == "Attention"]:
        for index, heads in enumerate((4, 2, 2)):
            target = new_weight(model.graph, f"{node.name}.{index}", ir.tensor(np.array([0, 0, heads * 16])))
            swap = ir.node("Transpose", [node.inputs[index]], {"perm": [0, 2, 1, 3]}, name=f"{node.name}.swap{index}")
            join = ir.node("Reshape", [swap.outputs[0], target], name=f"{node.name}.join{index}")
            for made, dims in ((swap, [heads, 16]), (join, [heads * 16])):
                made.outputs[0].name, made.outputs[0].dtype = f"{made.name}.out", ir.DataType.FLOAT
                made.outputs[0].shape = ir.Shape(["batch", "length", *dims])
            model.graph.insert_before(node, [swap, join])
            node.replace_input_with(index, join.outputs[0])
        node.attributes["q_num_heads"] = ir.AttrInt64("q_num_heads", 4)
        node.attributes["kv_num_heads"] = ir.AttrInt64("kv_num_heads", 2)
        (use,) = node.outputs[0].uses()
        (join_use,) = use.node.outputs[0].uses()
        join_use.node.outputs[0].replace_all_uses_with(node.outputs[0])
        model.graph.remove([join_use.node, use.node], safe=True)
        node.outputs[0].shape = ir.Shape(["batch", "length", 64])
    expected = logits_by_calls(before, [20, 1], [0, 4])
    assert relative(expected, logits_by_calls(session(model, tmp_path / "rows"), [20, 1], [0, 4])) < FLOAT32
    report = run_pass(model, "page_kv", page=16)
    assert not report.skips
    assert relative(expected, logits_by_calls(session(model, tmp_path / "after"), [20, 1], [0, 4])) < FLOAT32


def test_scale_and_softcap_are_carried_over(make_artifact: MakeArtifact) -> None:
    model = canonical(make_artifact("granite"))
    for node in model.graph:
        if node.op_type == "Attention":
            node.attributes["softcap"] = ir.AttrFloat32("softcap", 5.0)
    run_pass(model, "page_kv")
    for layer in layers_of(model.graph):
        assert layer.attributes.scale == pytest.approx(0.1)
        assert layer.attributes.softcap == 5.0


def test_rotated_queries_and_keys_are_read_as_rows(make_artifact: MakeArtifact, tmp_path: Path) -> None:
    model = canonical(make_artifact("llama"))
    run_pass(model, "fold_norms")
    before = session(model, tmp_path / "before")
    run_pass(model, "rotate", query_key="hadamard")
    run_pass(model, "page_kv", page=16)
    assert "Transpose" not in {node.op_type for node in model.graph}
    expected = logits_by_calls(before, [20, 1], [0, 4])
    assert relative(expected, logits_by_calls(session(model, tmp_path / "after"), [20, 1], [0, 4])) < FLOAT32


def test_a_rotation_that_comes_too_late_is_refused_for_heads_and_certified(
    make_artifact: MakeArtifact, tmp_path: Path
) -> None:
    first = [{"step": "canonicalize"}, {"step": "page_kv"}]
    late = [
        {"step": "canonicalize"},
        {"step": "fold_norms"},
        {"step": "rotate", "value": "hadamard", "query_key": "hadamard"},
    ]
    paged = optimize(make_artifact("llama"), Recipe.model_validate({"name": "paged", "steps": first}))
    made = optimize(paged, Recipe.model_validate({"name": "late", "steps": late}), tmp_path / "out")
    report = made.manifest.passes[-2]
    assert report.name == "rotate"
    assert any("KVAttention" in str(skip.reason) for skip in report.skips)
    assert any("rotated" in str(change.what) and "residual" in str(change.what) for change in report.changes)
    assert [check.status for check in made.manifest.checks if check.name == "certificate"] == ["proved"]


def test_the_certificate_holds_where_rotations_come_first(make_artifact: MakeArtifact, tmp_path: Path) -> None:
    steps: list[dict[str, Any]] = [{"step": name} for name in ("canonicalize", "fold_norms")]
    steps += [{"step": "rotate", "query_key": "hadamard"}, {"step": "page_kv", "page": 16}]
    made = optimize(make_artifact("llama"), Recipe.model_validate({"name": "paged", "steps": steps}), tmp_path / "out")
    checks = {(check.name, check.after): check for check in made.manifest.checks}
    assert checks["certificate", "rotate"].status == "proved"
    measured = checks["logits", "page_kv"]
    assert measured.figures["largest_change"] < FLOAT32
    assert "behind 16 of context" in str(measured.reason)
    assert checks["kernels", "the recipe"].figures["KVAttention_nodes"] == 2


def _attention(model: ir.Model, which: int = 0) -> ir.Node:
    return [node for node in model.graph if node.op_type == "Attention"][which]


def _bias(model: ir.Model) -> None:
    """A bias per head on top of the mask, which no distance changes."""
    node = _attention(model)
    slopes = np.linspace(-0.5, -0.1, 4, dtype=np.float32).reshape(1, 4, 1, 1)
    slope = new_weight(model.graph, "slopes", ir.tensor(slopes))
    hidden = new_weight(model.graph, "hidden", ir.tensor(np.array(-np.inf, np.float32)))
    biased = ir.node("Where", [node.inputs[3], slope, hidden], name="biased")
    biased.outputs[0].name, biased.outputs[0].dtype = "biased.out", ir.DataType.FLOAT
    model.graph.insert_before(node, biased)
    node.replace_input_with(3, biased.outputs[0])


def _with_differential_attention(model: ir.Model) -> None:
    """Let attention be y1 - y2 / 2, of which each reads half of the heads of the values, once for each head of keys.

    The exporter's graph concatenates caches outside of ``Attention``, where others may read them.
    """
    graph = model.graph
    presents = {value.name: value for value in graph.outputs}
    half = shared_constant(graph, "half", np.array(0.5, np.float32))
    for layer, node in enumerate([node for node in graph if node.op_type == "Attention"]):
        insert = Inserter(graph, node, f"differential.{layer}")
        key, value = (presents[f"present.{layer}.{part}"] for part in ("key", "value"))
        batch, heads, tokens, size = value.shape
        (guard,) = (use.node for use in node.outputs[0].uses())  # for queries of padding, which see nothing
        assert guard.op_type == "Where"
        bypass(guard, node.outputs[0])
        split = ir.node("Split", [value], {"axis": 1, "num_outputs": 2}, num_outputs=2, name=f"halves.{layer}")
        for index, output in enumerate(split.outputs):
            output.name, output.type = f"halves.{layer}.{index}", value.type
            output.shape = ir.Shape([batch, 1, tokens, size])
        graph.insert_before(node, split)
        rows = []
        for index, output in enumerate(split.outputs):
            tiled = insert.op(
                "Tile", [output, insert.integers([1, heads, 1, 1])], list(value.shape), value.dtype, f"tiled{index}"
            )
            inputs = [node.inputs[0], key, tiled, *node.inputs[3:]]
            copy = clone_node(node, inputs, f"{node.name}.{index}")
            graph.insert_before(node, copy)
            rows.append(name_output(copy, node.outputs[0]))
        less = insert.op("Mul", [rows[1], half], list(rows[1].shape), value.dtype, "less")
        take_place(node.outputs[0], insert.op("Sub", [rows[0], less], list(less.shape), value.dtype, "difference"))
        graph.remove(node, safe=True)


def test_what_is_made_of_a_cache_token_by_token_has_a_cache_of_its_own(
    make_artifact: MakeArtifact, tmp_path: Path
) -> None:
    model = artifact.read(make_artifact("llama")).model
    _with_differential_attention(model)
    before = session(model, tmp_path / "before")
    run_pass(model, "canonicalize")
    assert not run_pass(model, "page_kv", page=16).skips
    assert sorted(layer.number for layer in layers_of(model.graph)) == [0, 1, 2, 3]
    after = session(model, tmp_path / "after")
    for calls, paddings in (([14, 1, 1, 1], [0]), ([5, 20, 1, 9], [0, 11, 24, 3])):
        expected, found = (logits_by_calls(opened, calls, paddings) for opened in (before, after))
        assert relative(expected, found) < FLOAT32


SLOPES = (0.5, 0.3, 0.0625, 0.0)


def _biases_by_distance(model: ir.Model, *, counts_padding: bool, is_square: bool = False) -> None:
    """Add slope j to the scores of the key at column j, or that is the j-th token (ALiBi); or slope j^2."""
    graph, mask = model.graph, next(value for value in model.graph.inputs if value.name == "attention_mask")
    insert = Inserter(graph, graph[0], "alibi")
    dims, axis, one = list(mask.shape), insert.integers(-1), insert.integers(1)
    counted = mask
    if counts_padding:
        shape = insert.op("Shape", [mask], [2], ir.DataType.INT64, "shape")
        counted = insert.op("Expand", [one, shape], dims, ir.DataType.INT64, "ones")
    total = insert.op("CumSum", [counted, axis], dims, ir.DataType.INT64, "total")
    places = insert.op("Sub", [total, one], dims, ir.DataType.INT64, "places")
    if is_square:
        places = insert.op("Mul", [places, places], dims, ir.DataType.INT64, "squares")
    wide = insert.op(
        "Unsqueeze", [places, insert.integers([1, 2])], [dims[0], 1, 1, dims[1]], ir.DataType.INT64, "wide"
    )
    numbers = insert.op("Cast", [wide], list(wide.shape), ir.DataType.FLOAT, "numbers", to=ir.DataType.FLOAT)
    slopes = new_weight(graph, "slopes", ir.tensor(np.array(SLOPES, np.float32).reshape(1, 4, 1, 1)))
    biases = insert.op("Mul", [slopes, numbers], [dims[0], 4, 1, dims[1]], ir.DataType.FLOAT, "biases")
    hidden = new_weight(graph, "hidden", ir.tensor(np.array(np.finfo(np.float32).min)))
    for node in [node for node in graph if node.op_type == "Attention"]:
        visible = node.inputs[3]
        rows = [dims[0], 4, list(visible.shape)[2], dims[1]]
        added = Inserter(graph, node, f"{node.name}.alibi").op(
            "Where", [visible, biases, hidden], rows, ir.DataType.FLOAT, "mask"
        )
        node.replace_input_with(3, added)


@pytest.mark.parametrize("counts_padding", [True, False])
def test_biases_by_distance_are_slopes(counts_padding: bool, make_artifact: MakeArtifact, tmp_path: Path) -> None:
    """As MPT adds them, by columns, and as Bloom does, by tokens."""
    model = canonical(make_artifact("llama"))
    _biases_by_distance(model, counts_padding=counts_padding)
    before = session(model, tmp_path / "before")
    report = run_pass(model, "page_kv", page=16)
    assert not report.skips
    assert "with biases by distance" in " ".join(str(change.what) for change in report.changes)
    assert {layer.attributes.slopes for layer in layers_of(model.graph)} == {tuple(map(float, np.float32(SLOPES)))}
    after = session(model, tmp_path / "after")
    for calls, paddings in (([14, 1, 1, 1], [0]), ([5, 20, 1, 9], [0, 11, 24, 3])):
        expected, found = (logits_by_calls(opened, calls, paddings) for opened in (before, after))
        assert relative(expected, found) < FLOAT32
    # a token of nearest integers of 8 bits is off by 1/500 of what it spans
    assert not run_pass(model, "quantize_kv", storage="int8").skips
    expected, found = (logits_by_calls(opened, [40], [0]) for opened in (before, session(model, tmp_path / "int8")))
    assert relative(expected, found) < 0.01
    assert {str(skip.reason) for skip in run_pass(model, "sparse_kv", policy="retrieval", budget=1).skips} == {
        "its scores have a bias by distance, and its pages are read by all or by streaming heads"
    }


def test_biases_by_distance_that_pages_do_not_have(make_artifact: MakeArtifact) -> None:
    for change, target, reason in (
        ({"is_square": True}, "ort-cpu", "it adds a bias to visible scores"),
        ({}, "ort-cuda", "its scores have a bias by distance, for which GPUs have no kernel"),
    ):
        model = canonical(make_artifact("llama"))
        _biases_by_distance(model, counts_padding=True, **change)
        context = replace(make_context(task_of(model.graph)), target=target)
        report = PASSES["page_kv"]()(model, context).report
        assert reason in str(report.skips[0].reason)
        assert not kv_nodes(model.graph)


def _not_causal(model: ir.Model) -> None:
    _attention(model).attributes["is_causal"] = ir.AttrInt64("is_causal", 0)


def _without_mask(model: ir.Model) -> None:
    _attention(model).replace_input_with(3, None)


def _mask_read_elsewhere(model: ir.Model) -> None:
    mask = next(value for value in model.graph.inputs if value.name == "attention_mask")
    total = ir.node("ReduceSum", [mask], name="count")
    total.outputs[0].name, total.outputs[0].dtype = "count.out", ir.DataType.INT64
    model.graph.append(total)
    model.graph.outputs.append(total.outputs[0])


def _cache_read_elsewhere(model: ir.Model) -> None:
    copy = ir.node("Neg", [_attention(model).outputs[1]], name="copy")
    copy.outputs[0].name, copy.outputs[0].dtype = "copy.out", ir.DataType.FLOAT
    model.graph.append(copy)
    model.graph.outputs.append(copy.outputs[0])


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (_bias, "it adds a bias to visible scores"),
        (_not_causal, "neither causal, nor a sliding window, nor chunks"),
        (_without_mask, "it lets queries see padding"),
        (_mask_read_elsewhere, "ReduceSum count reads attention_mask too"),
        (_cache_read_elsewhere, "its cache is read elsewhere"),
    ],
)
def test_what_is_not_understood_is_left_alone_with_all_other_layers(
    spoil: Callable[[ir.Model], None], reason: str, make_artifact: MakeArtifact, tmp_path: Path
) -> None:
    model = canonical(make_artifact("llama"))
    spoil(model)
    inputs = [value.name for value in model.graph.inputs]
    report = run_pass(model, "page_kv")
    assert not kv_nodes(model.graph)
    assert [value.name for value in model.graph.inputs] == inputs
    reasons = [str(skip.reason) for skip in report.skips]
    assert len(reasons) == 2
    assert reason in reasons[0]
    assert reason in reasons[1] or "a graph has one kind of cache" in reasons[1]
    session(model, tmp_path)  # it still loads


def test_heads_of_other_sizes_get_zeros_behind_them(tmp_path: Path) -> None:
    model = decoder(2)
    run_pass(model, "canonicalize")
    before = session(model, tmp_path / "before")
    report = run_pass(model, "page_kv", page=16)
    assert not report.skips
    assert {layer.head_size for layer in layers_of(model.graph)} == {16}
    assert "with heads of 8 numbers stored as 16" in " ".join(str(change.what) for change in report.changes)
    after = session(model, tmp_path / "after")
    for calls, paddings in (([14, 1, 1], [0]), ([5, 20, 1], [0, 11])):
        expected, found = (logits_by_calls(opened, calls, paddings, vocabulary=48) for opened in (before, after))
        assert relative(expected, found) < FLOAT32


def test_heads_that_are_too_large_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "MOST_OF_FLOATS", 4)
    model = decoder(1)
    run_pass(model, "canonicalize")
    report = run_pass(model, "page_kv")
    assert [str(skip.reason) for skip in report.skips] == ["its heads have 8 numbers, and KVAttention takes up to 4"]


def test_attention_in_small_operators_is_lifted_first_and_reported_where_it_was_not(
    make_artifact: MakeArtifact,
) -> None:
    lifted = canonical(make_artifact("gemma2"))
    assert not run_pass(lifted, "page_kv").skips
    said = [layer_of(node).attributes for node in kv_nodes(lifted.graph)]
    assert [(each.window, each.softcap) for each in said] == [(6, pytest.approx(50.0)), (0, pytest.approx(50.0))]
    report = run_pass(artifact.read(make_artifact("gemma2")).model, "page_kv")
    assert [str(skip.reason) for skip in report.skips] == [
        "it has no standard Attention; canonicalize lifts what exporters spell out"
    ]


def test_a_second_time_changes_nothing(make_artifact: MakeArtifact) -> None:
    model = canonical(make_artifact("llama"))
    run_pass(model, "page_kv")
    report = run_pass(model, "page_kv", page=16)
    assert not report.changes
    assert {layer_of(node).attributes.page for node in kv_nodes(model.graph)} == {64}


def test_chunks_of_columns_are_none_of_tokens(make_artifact: MakeArtifact) -> None:
    model = canonical(make_artifact("llama"))
    # a query sees only keys of its own eight columns, padding counted
    tape = ir.tape.Tape()
    one, eight = (new_weight(model.graph, f"n{n}", ir.tensor(np.array(n, np.int64))) for n in (1, 8))
    zero = new_weight(model.graph, "n0", ir.tensor(np.array(0, np.int64)))
    axis = new_weight(model.graph, "axis", ir.tensor(np.array([0], np.int64)))
    inputs = {value.name: value for value in model.graph.inputs}
    keys = tape.op("Squeeze", [tape.op("Shape", [inputs["attention_mask"]], {"start": 1, "end": 2}), axis])
    new = tape.op("Squeeze", [tape.op("Shape", [inputs["input_ids"]], {"start": 1, "end": 2}), axis])
    chunk = tape.op("Div", [tape.op("Range", [zero, keys, one]), eight])
    mine = tape.op("Div", [tape.op("Range", [tape.op("Sub", [keys, new]), keys, one]), eight])
    same = tape.op(
        "Equal", [tape.op("Unsqueeze", [mine, new_weight(model.graph, "a1", ir.tensor(np.array([1])))]), chunk]
    )
    for node in tape.nodes:
        node.name = node.outputs[0].name = f"chunks.{len(model.graph)}.{id(node)}"
    attention = _attention(model)
    mask = ir.node("And", [attention.inputs[3], same], name="chunks")
    mask.outputs[0].name, mask.outputs[0].dtype = "chunks.out", ir.DataType.BOOL
    model.graph.insert_before(attention, [*tape.nodes, mask])
    attention.replace_input_with(3, mask.outputs[0])
    reasons = [str(skip.reason) for skip in run_pass(model, "page_kv").skips]
    assert "neither causal, nor a sliding window, nor chunks" in reasons[0]
