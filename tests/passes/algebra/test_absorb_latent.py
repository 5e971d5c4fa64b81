from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
from hypothesis import given, settings
from hypothesis import strategies as st

from graphopt.compile.pipeline import optimize
from graphopt.graph.editing import Inserter
from graphopt.graph.weights import new_weight
from graphopt.passes.common.sinks import MASKED_SCORES, scale_by_sinks, sinks_of
from graphopt.passes.recipe import Recipe
from tests.graphs import canonical, relative, run_pass, session
from tests.passes.cache.test_page_kv import logits_by_calls

MakeArtifact = Callable[[str], Path]

# Of the largest logit: products in another order, in float32. Seen up to 8e-7; a wrong column moves logits by 1e-2.
FLOAT32 = 1e-5


def test_keys_and_values_of_stored_tokens_are_not_made_again(make_artifact: MakeArtifact, tmp_path: Path) -> None:
    model = canonical(make_artifact("deepseek_v3"))
    before = session(model, tmp_path / "before")
    report = run_pass(model, "absorb_latent")
    assert not report.skips
    (fact,) = [change.what for change in report.changes if change.what.code == "absorb_latent.absorbed"]
    assert fact.figures == {"heads": 4, "rank": 32, "common": 16, "key": 32, "value": 16}
    assert not [
        node for node in model.graph if node.op_type in ("ScatterND", "Expand") and "self_attn" in str(node.name)
    ]
    (attention,) = [node for node in model.graph if node.op_type == "Attention"]
    query, key, value = (list(each.shape)[1::2] for each in attention.inputs[:3])
    assert (query, key, value) == ([4, 48], [1, 48], [1, 32])
    presents = {value.name: value for value in model.graph.outputs}
    readers = {use.node.op_type for use in presents["present.0.key"].uses()}
    assert readers == {"Concat", "Attention"}
    after = session(model, tmp_path / "after")
    for calls, paddings in (([40], [0]), ([14, 1, 1, 1, 1], [0]), ([5, 20, 1, 9], [0, 11, 24, 3])):
        expected, logits = (logits_by_calls(opened, calls, paddings) for opened in (before, after))
        assert relative(expected, logits) < FLOAT32


def test_a_recipe_gets_the_step_unasked_where_a_product_expands_a_cache(
    make_artifact: MakeArtifact, llama_artifact: Path, tmp_path: Path
) -> None:
    recipe = Recipe.model_validate({"name": "canonical", "steps": [{"step": "canonicalize"}]})
    latents, heads = (ir.load(folder / "model.onnx") for folder in (make_artifact("deepseek_v3"), llama_artifact))
    names = [[step.name for step in recipe.fitting(model.graph).steps] for model in (latents, heads)]
    assert ["absorb_latent" in steps for steps in names] == [True, False]
    artifact = optimize(make_artifact("deepseek_v3"), recipe, tmp_path / "out", quality_tokens=0)
    assert [entry.name for entry in artifact.manifest.passes][:2] == ["canonicalize", "absorb_latent"]


def test_heads_that_read_no_latent_stay(llama_artifact: Path) -> None:
    model = canonical(llama_artifact)
    report = run_pass(model, "absorb_latent")
    assert {str(skip.reason) for skip in report.skips} == {
        "its keys and values are not made of one latent for all heads"
    }


@settings(max_examples=8)
@given(data=st.data())
def test_any_split_of_columns_is_found(data: st.DataObject) -> None:
    """Keys and values from two weights or one, in either order, with a shared part before, behind, or without one."""
    heads, rank = data.draw(st.sampled_from([1, 3])), data.draw(st.sampled_from([4, 16]))
    own, width = data.draw(st.sampled_from([2, 8])), data.draw(st.sampled_from([2, 6]))
    shared, is_first = data.draw(st.sampled_from([0, 4])), data.draw(st.booleans())
    together, values_first = data.draw(st.booleans()), data.draw(st.booleans())
    model = _attention(heads, rank, own, width, shared, is_first, together, values_first)
    random = np.random.default_rng(0)
    feeds = {
        "q": random.standard_normal((2, heads, 3, own + shared)).astype(np.float32),
        "c": random.standard_normal((2, 1, 5, rank)).astype(np.float32),
        "r": random.standard_normal((2, 1, 5, shared)).astype(np.float32),
    }
    if not shared:
        del feeds["r"]
    before = _run(model, feeds)
    report = run_pass(model, "absorb_latent")
    assert [change.what.code for change in report.changes] == ["absorb_latent.absorbed"]
    assert relative(before, _run(model, feeds)) < FLOAT32
    # what is left are products of the few new tokens
    assert Counter(node.op_type for node in model.graph)["MatMul"] == 2


def test_sinks_are_a_factor_in_front_of_what_makes_values() -> None:
    """As Hunyuan 4 has them; scores that anything else reads keep attention as it is."""
    model = _with_sinks()
    random = np.random.default_rng(0)
    shapes = {"q": (2, 3, 3, 6), "c": (2, 1, 5, 4), "r": (2, 1, 5, 4)}
    feeds = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    before = _run(model, feeds)
    report = run_pass(model, "absorb_latent")
    assert [change.what.code for change in report.changes] == ["absorb_latent.absorbed"]
    assert relative(before, _run(model, feeds)) < FLOAT32
    (attention,) = [node for node in model.graph if node.op_type == "Attention"]
    assert sinks_of(attention) is not None  # which pages and blocks take as they are
    model = _with_sinks()
    scores = next(node for node in model.graph if node.op_type == "Attention").outputs[3]
    model.graph.outputs.append(scores)
    assert [skip.reason.code for skip in run_pass(model, "absorb_latent").skips] == ["absorb_latent.scores-read"]


def _with_sinks() -> ir.Model:
    """Return attention of 3 heads with logits that join its softmax."""
    model = _attention(3, 4, 2, 2, 4, is_first=False, together=True, values_first=False)
    old = next(node for node in model.graph if node.op_type == "Attention")
    y, last = old.outputs[0], ir.node("Identity", [old.outputs[0]], name="last")
    model.graph.append(last)
    attributes = {"scale": 0.3, "qk_matmul_output_mode": MASKED_SCORES}
    attention = ir.node("Attention", old.inputs, attributes, num_outputs=4, name="attention")
    for value, width in zip(attention.outputs, (2, None, None, "keys"), strict=True):
        value.name, value.dtype, value.shape = f"made.{width}.{value.index()}", y.dtype, None
        if width is not None:
            value.shape = ir.Shape(["batch", 3, "length", width])
    model.graph.insert_before(last, attention)
    insert = Inserter(model.graph, last, "sinks")
    logits = new_weight(model.graph, "logits", ir.tensor(np.array([0.5, -1, 2], np.float32).reshape(1, 3, 1, 1)))
    scaled = scale_by_sinks(insert, attention.outputs[0], attention.outputs[3], logits)
    last.replace_input_with(0, scaled)
    model.graph.outputs.clear()
    model.graph.remove(old)
    y.name = "old"
    last.outputs[0].name, last.outputs[0].dtype, last.outputs[0].shape = "y", y.dtype, y.shape
    model.graph.outputs.append(last.outputs[0])
    return model


def _run(model: ir.Model, feeds: dict[str, np.ndarray]) -> np.ndarray:
    opened = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    return np.asarray(opened.run(["y"], feeds)[0])


def _attention(
    heads: int, rank: int, own: int, width: int, shared: int, is_first: bool, together: bool, values_first: bool
) -> ir.Model:
    """Return attention whose keys and values are products of the input c, and the input r for all heads."""
    float32, random = ir.DataType.FLOAT, np.random.default_rng(1)
    q = ir.val("q", float32, ["batch", heads, "length", own + shared])
    c = ir.val("c", float32, ["batch", 1, "keys", rank])
    r = ir.val("r", float32, ["batch", 1, "keys", shared])
    graph = ir.Graph([q, c, *([r] if shared else [])], [], nodes=[], opset_imports={"": 23}, name="latent")

    def op(op_type: str, inputs: list[ir.Value], dims: list[list[object]], **attributes: object) -> list[ir.Value]:
        number = len(list(graph))
        node = ir.node(op_type, inputs, attributes, num_outputs=len(dims), name=f"node{number}")  # type: ignore[arg-type]
        for index, (value, shape) in enumerate(zip(node.outputs, dims, strict=True)):
            value.name, value.dtype, value.shape = f"value{number}.{index}", float32, ir.Shape(shape)  # type: ignore[arg-type]
        graph.append(node)
        return list(node.outputs)

    def columns(count: int, name: str) -> ir.Value:
        matrix = (random.standard_normal((rank, heads * count)) / rank**0.5).astype(np.float32)
        (product,) = op(
            "MatMul", [c, new_weight(graph, name, ir.tensor(matrix))], [["batch", 1, "keys", heads * count]]
        )
        target = new_weight(graph, f"{name}.shape", ir.tensor(np.array([0, -1, heads, count])))
        (apart,) = op("Reshape", [product, target], [["batch", "keys", heads, count]])
        return op("Transpose", [apart], [["batch", heads, "keys", count]], perm=[0, 2, 1, 3])[0]

    if together:
        sizes = [width, own] if values_first else [own, width]
        lengths = new_weight(graph, "sizes", ir.tensor(np.array(sizes)))
        dims: list[list[object]] = [["batch", heads, "keys", size] for size in sizes]
        parts = op("Split", [columns(own + width, "both"), lengths], dims, axis=-1)
        key, value = parts[::-1] if values_first else parts
    else:
        key, value = columns(own, "keys"), columns(width, "values")
    if shared:
        target = new_weight(graph, "heads", ir.tensor(np.array([1, heads, 1, 1])))
        (copies,) = op("Expand", [r, target], [["batch", heads, "keys", shared]])
        order = [copies, key] if is_first else [key, copies]
        (key,) = op("Concat", order, [["batch", heads, "keys", own + shared]], axis=-1)
    (y,) = op("Attention", [q, key, value], [["batch", heads, "length", width]], scale=0.3)
    y.name = "y"
    graph.outputs.append(y)
    return ir.Model(graph, ir_version=11)


def test_a_cache_of_its_own_stays() -> None:
    model = _attention(2, 4, 2, 2, 0, is_first=False, together=True, values_first=False)
    (node,) = [node for node in model.graph if node.op_type == "Attention"]
    pasts = [
        ir.val(f"past_key_values.0.{part}", ir.DataType.FLOAT, ["batch", 2, "past", 2]) for part in ("key", "value")
    ]
    model.graph.inputs.extend(pasts)
    node.resize_inputs(6)
    for index, past in zip((4, 5), pasts, strict=True):
        node.replace_input_with(index, past)
    report = run_pass(model, "absorb_latent")
    assert [str(skip.reason) for skip in report.skips] == [
        "its cache holds keys and values per head, which a latent cannot replace"
    ]
