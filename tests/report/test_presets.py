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
    made = {value.name or "" for node in graph for value in node.outputs}
    ports = {value.name or "" for value in graph.inputs}
    return made | ports | set(graph.initializers) | {node.name or "" for node in graph}


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
        few = recipe.model_copy(update={"calibration": CalibrationOptions(windows=1, window=64)})
        made = optimize(source, few, quality_tokens=0)
        model, manifest = made.model, made.manifest
    else:
        model, reports = compile_artifact(source, recipe, tmp_path)
        manifest = source.manifest.model_copy(update={"passes": reports})
    there, untouched = names_of(source.model.graph), {(node.name, node.op_type) for node in source.model.graph}
    count = 0
    for count, each in enumerate(explanations(model, manifest), 1):  # noqa: B007
        assert each.origins, each.node.name
        assert set(each.origins) <= there, each.node.name
        assert not each.as_it_came_in or (each.node.name, each.node.operator) in untouched
    assert count == len(list(model.graph))

    folded = fold(model.graph)
    assert len(folded.layers()) == layers
    # how many inputs go past a product in floats differs from layer to layer, and with it the structure
    assert split or [part.count for part in folded.parts if isinstance(part, Repeat)] == [layers]
    # no product of a layer is left outside: the first and the last layer are whole
    inside = {segment for layer in folded.layers() for segment in layer}
    outside = [node for number, nodes in enumerate(folded.order) if number not in inside for node in nodes]
    assert not [node.name for node in outside if "layers." in (node.name or "")]
    shuffle_names(model)
    shuffled = fold(model.graph)
    assert (shuffled.parts, shuffled.structures, shuffled.parameters) == (
        folded.parts, folded.structures, folded.parameters
    )  # fmt: skip


def test_the_deep_ones_are_tried() -> None:
    assert set(DEEP) <= set(distinct())


def test_how_codes_are_chosen_changes_no_node(llama_artifact: Path) -> None:
    few = {"windows": 1, "window": 64}
    recipe = load_recipe("small")
    chosen = recipe.model_copy(update={"calibration": recipe.calibration.model_copy(update=few)})
    models = [
        optimize(llama_artifact, each, quality_tokens=0).model
        for each in (chosen, recipe.setting("quantize_weights", rounding="nearest"))
    ]
    said = [
        [(each.call, each.origins, [edge.stage for edge in each.edges]) for each in explanations(model, None)]
        for model in models
    ]
    assert said[0] == said[1]
    assert fold(models[0].graph).structures == fold(models[1].graph).structures
