"""Storages of caches by layer that a search finds: what is measured, what is chosen, and the recipe in the end."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from graphopt.analysis.structure.paged_caches import layers_of
from graphopt.artifact import artifact
from graphopt.cli.commands import COMMANDS
from graphopt.compile.search import CacheStorages, search_caches
from graphopt.compile.search.caches import _Caches
from graphopt.errors import InputError
from graphopt.passes.recipe import Recipe, load_recipe
from graphopt.quantization.statistics.options import CalibrationOptions
from graphopt.util.progress import silent
from graphopt.util.stdlib_text import held_out_text
from tests.graphs import compile_artifact

TEXTS = CalibrationOptions(window=128, windows=2)
# pages as small as they come, so that a window of 128 tokens reads rounded ones
RECIPE = Recipe.model_validate(
    {"name": "small-pages", "steps": [{"step": "canonicalize"}, {"step": "quantize_kv", "storage": "int4", "page": 16}]}
)
STORAGES = ("int8", "int4", "int2")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("search")
    (folder / "text.py").write_text(held_out_text()[:4000])
    (folder / "recipe.yaml").write_text(RECIPE.to_yaml())
    return folder


@pytest.fixture(scope="module")
def texts(work: Path) -> CalibrationOptions:
    return TEXTS.model_copy(update={"text": work / "text.py"})


@pytest.fixture(scope="module")
def result(llama_artifact: Path, work: Path, texts: CalibrationOptions) -> CacheStorages:
    """In the bytes that the recipe takes."""
    return search_caches(llama_artifact, work, recipe=RECIPE, storages=STORAGES, texts=texts)


def test_it_takes_no_more_bytes_than_the_recipe_and_expects_no_more_loss(result: CacheStorages) -> None:
    assert 0 < result.bytes <= result.recipe_bytes
    assert all(row.keys > 0 and row.values > 0 for row in result.losses)  # codes of 2 bits change what a layer makes
    # of normal numbers in sets of 16, which span 3.5 deviations: int2 cuts a tenth off, a step is 1.06 then, and 0.24
    # or 0.014 of the others; a square of a step / 12 each
    shares = {"int8": 1.7e-4, "int4": 0.05, "int2": 1.0}

    def expected(layers: dict[int, tuple[str, str]], power: float) -> float:
        powers = {storage: math.pow(share, power) for storage, share in shares.items()}
        return sum(
            row.keys * powers[layers[row.layer][0]] + row.values * powers[layers[row.layer][1]] for row in result.losses
        )

    recipe = dict.fromkeys(result.layers, ("int4", "int4"))
    assert any(expected(result.layers, power) <= expected(recipe, power) for power in (1, 1.25, 1.5))
    assert result.loss > 0
    assert result.recipe_loss > 0


def test_the_recipe_stores_what_was_chosen(result: CacheStorages, llama_artifact: Path, tmp_path: Path) -> None:
    assert result.recipe.name == "small-pages-searched"
    model, _ = compile_artifact(artifact.read(llama_artifact), result.recipe, tmp_path)
    layers = layers_of(model.graph)
    for layer in layers:
        kv = layer.attributes
        assert (kv.storage, kv.value_storage or kv.storage) == result.layers[layer.number]
    # the bytes that it promises are those of a page more
    assert sum(layer.bytes(1, 3) - layer.bytes(1, 2) for layer in layers) == pytest.approx(16 * result.bytes)


def test_of_some_answers_the_one_is_taken_that_loses_least_as_a_whole(
    monkeypatch: pytest.MonkeyPatch, llama_artifact: Path, work: Path, texts: CalibrationOptions
) -> None:
    caches = _Caches(llama_artifact, RECIPE, work, texts)
    answers: list[dict[int, tuple[str, str]]] = [{0: ("int8", "int8")}, {0: ("int2", "int4")}, {0: ("int4", "int4")}]
    losses = [0.3, 0.1, 0.2]
    monkeypatch.setattr(caches, "_divergence", lambda layers, sample: losses[answers.index(layers)])
    assert caches.best(answers, silent) == answers[1]


def test_many_bytes_are_the_finest_codes(
    result: CacheStorages, llama_artifact: Path, work: Path, texts: CalibrationOptions
) -> None:
    finest = search_caches(llama_artifact, work, recipe=RECIPE, room=1e9, storages=STORAGES, texts=texts)
    assert finest.losses == result.losses  # nothing is measured again
    assert set(finest.layers.values()) == {("int8", "int8")}
    assert finest.loss < result.loss


def test_few_bytes_are_coarse_codes(
    result: CacheStorages, llama_artifact: Path, work: Path, texts: CalibrationOptions
) -> None:
    room = result.recipe_bytes * 0.9
    coarse = search_caches(llama_artifact, work, recipe=RECIPE, room=room, storages=STORAGES, texts=texts)
    assert coarse.bytes <= room
    assert "int2" in str(coarse.layers)
    assert coarse.loss > result.loss


def test_a_layer_that_the_recipe_leaves_in_floats_stays_so(
    llama_artifact: Path, tmp_path: Path, texts: CalibrationOptions
) -> None:
    recipe = RECIPE.setting("quantize_kv", layers={1: "float32"})
    partial = search_caches(llama_artifact, tmp_path, recipe=recipe, storages=STORAGES, texts=texts)
    assert [row.layer for row in partial.losses] == [0]
    model, _ = compile_artifact(artifact.read(llama_artifact), partial.recipe, tmp_path)
    assert [layer.attributes.storage == "float32" for layer in layers_of(model.graph)] == [False, True]


def test_a_search_that_was_cut_off_goes_on(
    result: CacheStorages, llama_artifact: Path, work: Path, texts: CalibrationOptions
) -> None:
    (file,) = work.glob("caches-*.jsonl")
    whole = file.read_text()
    file.write_text(whole[:-20])
    assert search_caches(llama_artifact, work, recipe=RECIPE, storages=STORAGES, texts=texts) == result
    assert file.read_text() == whole


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recipe": "int4"}, "has no step quantize_kv with a storage of integers"),
        ({"storages": ("float16",)}, "float16 cannot be searched: caches are chosen among integers"),
        ({"storages": ("int4", "int3")}, "heads of 16 numbers cannot be stored as int3, which pack 32 at a time"),
        ({"room": 1.0}, "and there is room for 1"),
        ({"recipe": "kv4"}, "a window has 128 tokens, and the first 256 of them read pages of floats"),
    ],
)
def test_what_cannot_be_searched_is_refused(
    options: dict[str, object], message: str, llama_artifact: Path, work: Path, texts: CalibrationOptions
) -> None:
    arguments: dict[str, object] = {"recipe": RECIPE, "storages": STORAGES, "texts": texts, **options}
    with pytest.raises(InputError, match=message):
        search_caches(llama_artifact, work, **arguments)  # type: ignore[arg-type]


def test_the_command_writes_the_recipe(
    result: CacheStorages, llama_artifact: Path, work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    COMMANDS["search-cache"](
        llama_artifact,
        tmp_path / "out.yaml",
        recipe=str(work / "recipe.yaml"),
        storages=list(STORAGES),
        text=work / "text.py",
        window=128,
        windows=2,
        work=work,
        as_json=True,
    )
    assert load_recipe(tmp_path / "out.yaml") == result.recipe
    assert json.loads(capsys.readouterr().out)["loss"] == result.loss
