"""What presets make of a model: its layers are found whatever names are, every node has an origin.

Of presets that make the same nodes one is tried, see `tests/presets.py`.
"""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest

from graphopt.analysis.structure.folding import Repeat, fold
from graphopt.artifact import artifact
from graphopt.compile.pipeline import optimize
from graphopt.passes.recipe import load_recipe
from graphopt.quantization.statistics.options import CalibrationOptions
from graphopt.report.explanation import explanations
from tests.decoders import shuffle_names
from tests.graphs import compile_artifact
from tests.presets import distinct

# What the shipped model of six layers is made into; of all other presets the small one of two layers tells as much.
DEEP = ("int4", "rotate-kv4")


def names_of(graph: ir.Graph) -> set[str]:
    outputs = {value.name or "" for node in graph for value in node.outputs}
    ports = {value.name or "" for value in graph.inputs}
    return outputs | ports | set(graph.initializers) | {node.name or "" for node in graph}


@pytest.fixture(scope="module")
def sources(shipped_artifact: Path, llama_artifact: Path) -> dict[int, artifact.Artifact]:
    """The shipped model and the small one by how many layers they have."""
    return {6: artifact.read(shipped_artifact), 2: artifact.read(llama_artifact)}


@pytest.mark.parametrize(("preset", "layers"), [(preset, 6 if preset in DEEP else 2) for preset in distinct()])
def test_layers_and_origins_of_every_preset(
    sources: dict[int, artifact.Artifact], preset: str, layers: int, tmp_path: Path
) -> None:
    source, recipe = sources[layers], distinct()[preset]
    split = any(step.name == "split_inputs" for step in recipe.steps)
    if split:  # it looks at activations, of a little text here
        quick_recipe = recipe.model_copy(update={"calibration": CalibrationOptions(windows=1, window=64)})
        result = optimize(source, quick_recipe, quality_tokens=0)
        model, manifest = result.model, result.manifest
    else:
        model, reports = compile_artifact(source, recipe, tmp_path)
        manifest = source.manifest.model_copy(update={"passes": reports})
    source_names, source_nodes = (
        names_of(source.model.graph),
        {(node.name, node.op_type) for node in source.model.graph},
    )
    count = 0
    for count, explanation in enumerate(explanations(model, manifest), 1):  # noqa: B007
        assert explanation.origins, explanation.node.name
        assert set(explanation.origins) <= source_names, explanation.node.name
        assert not explanation.as_it_came_in or (explanation.node.name, explanation.node.operator) in source_nodes
    assert count == len(list(model.graph))

    layer_fold = fold(model.graph)
    assert len(layer_fold.layers()) == layers
    # how many inputs go past a product in floats differs from layer to layer, and with it the structure
    assert split or [part.count for part in layer_fold.parts if isinstance(part, Repeat)] == [layers]
    # no product of a layer is left outside: the first and the last layer are whole
    inside = {segment for layer in layer_fold.layers() for segment in layer}
    outside = [node for number, nodes in enumerate(layer_fold.order) if number not in inside for node in nodes]
    assert not [node.name for node in outside if "layers." in (node.name or "")]
    shuffle_names(model)
    shuffled_fold = fold(model.graph)
    assert (shuffled_fold.parts, shuffled_fold.structures, shuffled_fold.parameters) == (
        layer_fold.parts, layer_fold.structures, layer_fold.parameters
    )  # fmt: skip


def test_the_deep_ones_are_tried() -> None:
    assert set(DEEP) <= set(distinct())


def test_how_codes_are_chosen_changes_no_node(llama_artifact: Path) -> None:
    sample = {"windows": 1, "window": 64}
    recipe = load_recipe("small")
    quick_recipe = recipe.model_copy(update={"calibration": recipe.calibration.model_copy(update=sample)})
    models = [
        optimize(llama_artifact, variant, quality_tokens=0).model
        for variant in (quick_recipe, recipe.setting("quantize_weights", rounding="nearest"))
    ]
    summaries = [
        [
            (explanation.call, explanation.origins, [edge.stage for edge in explanation.edges])
            for explanation in explanations(model, None)
        ]
        for model in models
    ]
    assert summaries[0] == summaries[1]
    assert fold(models[0].graph).structures == fold(models[1].graph).structures
