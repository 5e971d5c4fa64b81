from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from graphopt.artifact import artifact
from graphopt.errors import InputError
from graphopt.ort.session import ACCURACY_LEVEL
from graphopt.passes import PASSES
from graphopt.passes.algebra.fold_norms import FoldNorms
from graphopt.passes.algebra.rotate import Rotate
from graphopt.passes.base import Pass
from graphopt.passes.cache.quantize_kv import QuantizeKV
from graphopt.passes.codes.quantize_activations import QuantizeActivations
from graphopt.passes.codes.quantize_weights import EmbeddingFormat, LinearFormat, QuantizeWeights
from graphopt.passes.interface.last_logits import LastLogits
from graphopt.passes.lift.canonicalize import Canonicalize
from graphopt.passes.lower.flatten_heads import FlattenHeads
from graphopt.passes.lower.float16 import Float16
from graphopt.passes.lower.fuse_gates import FuseGates
from graphopt.passes.lower.fuse_residuals import FuseResiduals
from graphopt.passes.lower.fuse_rotary import FuseRotary
from graphopt.passes.lower.lower import Lower
from graphopt.passes.lower.merge_products import MergeProducts
from graphopt.passes.recipe import Recipe, load_recipe, presets
from graphopt.runtime_ops.instructions import ISA_VARIABLE
from graphopt.runtime_ops.library import PATH_VARIABLE
from tests.graphs import residual_model

FORMATS = st.sampled_from(["int4", "uint8", "fp6-e2m3", "nf4", (-1.0, 0.0, 0.5)])
LINEAR = st.none() | st.builds(LinearFormat, format=FORMATS, group=st.sampled_from([16, 32, 64, 128, 256, None]))
STEPS = st.one_of(
    st.builds(Canonicalize),
    st.builds(FoldNorms),
    st.builds(Rotate, residual=st.sampled_from(["hadamard", "random"]), seed=st.integers(0, 2**40)),
    st.builds(
        QuantizeWeights,
        linear=LINEAR,
        lm_head=LINEAR,
        embedding=st.none() | st.builds(EmbeddingFormat, group=st.none() | st.integers(1, 512)),
        scale=st.sampled_from(["extreme", "least_squares"]),
        activations=st.sampled_from(["float32", "bfloat16", "int8", "int16", None]),
    ),
    st.builds(QuantizeActivations, bits=st.sampled_from([4, 8]), clip=st.floats(0.1, 1.0), lm_head=st.booleans()),
    st.builds(LastLogits),
    st.builds(Lower, target=st.sampled_from(["portable", "ort-cpu"])),
    st.builds(MergeProducts),
)


def in_order(steps: list[Pass]) -> tuple[Pass, ...]:
    """Return ``steps`` in the order of their passes, which a recipe wants."""
    return tuple(sorted(steps, key=lambda step: list(PASSES).index(step.name)))


RECIPES = st.builds(
    Recipe,
    name=st.text(min_size=1),
    description=st.text(),
    steps=st.lists(STEPS, max_size=5).map(in_order),
    activations=st.sampled_from(["int8", "float32"]),
)


@given(RECIPES)
def test_yaml_round_trips(recipe: Recipe) -> None:
    assert Recipe.model_validate(yaml.safe_load(recipe.to_yaml())) == recipe


def test_steps_out_of_order_are_refused_with_the_order_that_is_right(tmp_path: Path) -> None:
    file = tmp_path / "late.yaml"
    file.write_text("name: late\nsteps: [{step: canonicalize}, {step: quantize_kv}, {step: rotate}]\n")
    with pytest.raises(InputError, match="canonicalize, rotate, quantize_kv is the right one"):
        load_recipe(file)


def test_any_step_can_be_added_and_set() -> None:
    recipe = load_recipe(
        "int4-rtn",
        add=["rotate", "fold_norms"],
        options=["rotate.seed=7", "quantize_weights.linear.group=32", "quantize_weights.embedding=null"],
    )
    assert [step.name for step in recipe.steps] == ["canonicalize", "fold_norms", "rotate", "quantize_weights"]
    rotate, weights = recipe.steps[2], recipe.steps[3]
    assert isinstance(rotate, Rotate)
    assert isinstance(weights, QuantizeWeights)
    assert rotate.seed == 7
    assert weights.linear == LinearFormat(group=32)
    assert weights.embedding is None


@pytest.mark.parametrize(
    ("add", "options", "message"),
    [
        (["quantise"], [], "there is no step 'quantise'.*known are"),
        ([], ["rotate.seed=7"], "has no step 'rotate'.*--add rotate"),
        ([], ["quantize_weights.linear.group=17"], "cannot be set so.*linear.group"),
        ([], ["quantize_weights.liner=null"], "cannot be set so.*its options are linear"),
        ([], ["quantize_weights"], "sets no option.*STEP.OPTION=VALUE"),
        ([], ["quantize_weights.linear=[1"], "is not YAML"),
    ],
)
def test_what_cannot_be_added_or_set_is_refused(add: list[str], options: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_recipe("int4-rtn", add=add, options=options)


def test_presets_are_named_as_their_files_and_load_by_name() -> None:
    fitted = ["fp6", "int3", "int4", "large", "medium", "mini", "nf4", "small", "tiny", "w4a4", "w4a8"]
    fitted += [f"rotate-{name}" for name in ("int4", "nf4", "w4a8", "kv4", "kv43")]
    quantized = [*fitted, "fp6-e3m2", "w8a8", "int8", "encoder-int8"]
    caches = ["kv4", "rotate-kv86", "streaming", "retrieval", "sparse-prefill"]
    rotated = ["rotate", "rotate-online", "rotate-fp6", "rotate-fp6-e3m2"]
    without_text = [f"{name}-rtn" for name in fitted]
    assert list(presets()) == sorted([*quantized, *rotated, *caches, *without_text, "float16"])
    for name, recipe in presets().items():
        assert load_recipe(name) == recipe
        assert recipe.description


def test_presets_are_calibrated_and_their_twins_need_no_data() -> None:
    needs = {
        name
        for name, recipe in presets().items()
        for step in recipe.steps
        if (isinstance(step, QuantizeWeights) and step.rounding.needs is not None)
        or (isinstance(step, QuantizeKV) and step.key_feedback)
    }
    assert needs == {name.removesuffix("-rtn") for name in presets() if name.endswith("-rtn")}
    assert {"int4", "small", "medium", "large"} < needs


def test_rotate_is_exact_only() -> None:
    assert {step.effect for step in load_recipe("rotate").passes()} == {"exact"}


def test_a_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("name: mine\nsteps:\n  - step: rotate\n    seed: 7\n")
    (step,) = load_recipe(file).steps
    assert step == Rotate(seed=7)


def test_activations_become_the_session_entry() -> None:
    recipe = Recipe(name="a", steps=(), activations="float32")
    assert recipe.session_entries() == {ACCURACY_LEVEL: "0"}
    assert Recipe(name="a", steps=()).session_entries() == {ACCURACY_LEVEL: "4"}


def test_a_step_that_leaves_activations_open_gets_those_of_the_recipe() -> None:
    steps = (QuantizeWeights(), QuantizeWeights(activations="int16"), Lower())
    for activations in ("int8", "float32"):
        recipe = Recipe(name="a", steps=steps, activations=activations)
        made = [step.activations for step in recipe.passes()]
        assert made == [activations, "int16", activations]


def test_a_target_sets_the_step_lower_or_adds_it() -> None:
    recipe = load_recipe("int4-rtn")
    lowered = recipe.with_lower("ort-cpu")
    assert lowered.steps == (
        *recipe.steps,
        MergeProducts(),
        FlattenHeads(),
        Lower(target="ort-cpu"),
    )
    assert lowered.with_lower("ort-cpu") == lowered
    assert recipe.with_lower("portable").steps == (*recipe.steps, Lower(target="portable"))


def test_caches_that_grow_go_into_pages_for_ort_cpu(llama_artifact: Path) -> None:
    grows, nothing = artifact.read(llama_artifact).model.graph, residual_model().graph
    plain = load_recipe("int4-rtn")

    def added(recipe: Recipe, graph: ir.Graph) -> bool:
        before, after = (sum(step.name == "page_kv" for step in each.steps) for each in (recipe, recipe.fitting(graph)))
        assert before <= after <= 1  # a step is added once, and none goes
        return after > before

    assert added(plain.with_lower("ort-cpu"), grows)
    assert not added(plain.with_lower("ort-cpu"), nothing), "it has no cache"
    assert not added(plain, grows), "its target is portable"
    assert added(plain.with_lower("ort-cuda"), grows)
    assert not added(plain.with_lower("ort-cpu").setting("lower", caches="growing"), grows)
    assert not added(load_recipe("kv4").with_lower("ort-cpu"), grows), "another step is about caches"


def test_options_of_lower_can_be_set_where_a_recipe_leaves_it_out(llama_artifact: Path) -> None:
    recipe = load_recipe("int4-rtn", options=["lower.caches=growing"]).with_lower("ort-cpu")
    assert recipe.steps[-1] == Lower(target="ort-cpu", caches="growing")
    fitted = recipe.fitting(artifact.read(llama_artifact).model.graph)
    assert "page_kv" not in [step.name for step in fitted.steps]


def test_a_target_may_name_the_instruction_set() -> None:
    recipe = load_recipe("int4-rtn").with_lower("ort-cpu:avx2")
    assert recipe.steps[-1] == Lower(target="ort-cpu", instructions="avx2")
    assert recipe.with_lower("ort-cpu") == recipe
    assert recipe.with_lower("ort-cpu:avx512").steps[-1] == Lower(target="ort-cpu", instructions="avx512")


def test_an_instruction_set_that_nobody_names_is_that_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PATH_VARIABLE, "")
    monkeypatch.setenv(ISA_VARIABLE, "avxvnni")
    recipe = load_recipe("int4-rtn")
    assert recipe.with_lower("ort-cpu").on_this_machine() == recipe.with_lower("ort-cpu:avxvnni")
    for chosen in ("ort-cpu:avx2", "portable", "ort-cuda"):
        named = recipe.with_lower(chosen)  # type: ignore[arg-type]
        assert named.on_this_machine() == named


def test_float16_is_the_last_step_and_asked_for_once() -> None:
    recipe = load_recipe("int4-rtn").adding("float16")
    assert recipe.steps[-1] == Float16()
    assert recipe.adding("float16") == recipe
    lowered = [
        *load_recipe("int4-rtn").steps,
        MergeProducts(),
        Lower(target="ort-cuda"),
        FuseGates(),
        FuseResiduals(),
        FuseRotary(),
        Float16(),
    ]
    assert list(recipe.with_lower("ort-cuda").steps) == lowered


def test_last_logits_are_asked_for_once() -> None:
    recipe = load_recipe("int4-rtn").adding("last_logits")
    assert recipe.steps[-1] == LastLogits()
    assert recipe.adding("last_logits") == recipe


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: x\nsteps: []\ncolour: red", "colour: Extra inputs are not permitted"),
        ("name: x\nsteps: [{step: rotate, sead: 1}]", "sead: Extra inputs are not permitted"),
        ("name: x\nsteps: [{step: rotat}]", "steps.0.*rotat"),
        (
            "name: x\nsteps: [{step: quantize_weights, linear: {format: int9}}]",
            "no number format 'int9'",
        ),
        ("name: x", "steps: Field required"),
        ("- just\n- a list", "recipe: Input should be"),
        ("name: [", "not YAML"),
        ("", "recipe: Input should be"),
    ],
)
def test_a_recipe_that_cannot_be_used_names_the_key(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(InputError, match=message) as error:
        load_recipe(file)
    assert str(error.value.file) == str(file)


def test_an_unknown_name_lists_the_presets() -> None:
    with pytest.raises(InputError, match="no recipe 'int5'.*rotate-int4-rtn"):
        load_recipe("int5")


def test_inputs_of_products_stay_as_they_are_on_gpus_unless_a_recipe_says_otherwise() -> None:
    recipe = Recipe(name="plain", steps=(QuantizeWeights(),))
    assert recipe.with_lower("ort-cuda").activations == "float32"
    assert recipe.with_lower("ort-cpu").activations == "int8"
    stated = Recipe(name="stated", steps=(QuantizeWeights(),), activations="int8")
    assert stated.with_lower("ort-cuda").activations == "int8"
    # what a manifest holds is read back as it was
    lowered = recipe.with_lower("ort-cuda")
    assert Recipe.model_validate(yaml.safe_load(lowered.to_yaml())).with_lower("ort-cuda").activations == "float32"
