"""A search on the model that ships, from statistics to an artifact of the bytes that were asked for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from pydantic import ValidationError
from tokenizers import Tokenizer, models
from tokenizers.pre_tokenizers import ByteLevel

from graphopt.artifact import artifact
from graphopt.artifact.tokens import texts_of
from graphopt.cli.commands import COMMANDS
from graphopt.compile.pipeline import optimize
from graphopt.compile.search import MixtureSearch, SearchResult, search
from graphopt.compile.search.choices import choice_of, name_of, stored_bytes
from graphopt.compile.search.losses import CalibratedMatrix, Database, Rounder, Row
from graphopt.errors import InputError
from graphopt.ort.session import Array, open_session
from graphopt.ort.session import run as run_session
from graphopt.passes.common.formats import LinearFormat
from graphopt.passes.recipe import Recipe, load_recipe
from graphopt.quality.figures import Comparison, log_probabilities
from graphopt.quantization.rounding.methods.nearest import NEAREST
from graphopt.quantization.statistics.options import CalibrationOptions
from graphopt.tasks import task_of
from graphopt.tasks.ports import IntArray

pytest.importorskip("scipy")  # of the extra `search`

SIZES, FORMATS = (2_400_000, 2_650_000), (choice_of("nl3:64"), choice_of("nl4:64"))
CALIBRATION = CalibrationOptions(windows=2, window=128)
MATRIX = np.random.default_rng(0).standard_normal((64, 128)).astype(np.float32)
MIXTURES = MixtureSearch(candidates=4, offspring=2, finalists=1, tokens=256)


def recipe(*options: str) -> Recipe:
    return load_recipe("small", options=options).model_copy(update={"calibration": CALIBRATION})


def run(model: Path, size: int | None, work: Path, **options: Any) -> SearchResult:
    settings = {"recipe": recipe(), "choices": FORMATS, "tokens": 64, "mixtures": MixtureSearch(candidates=0)}
    return search(model, size, work, **{**settings, **options})


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("search")


@pytest.fixture(scope="module")
def results(work: Path, shipped_artifact: Path) -> list[SearchResult]:
    return [run(shipped_artifact, size, work) for size in SIZES]


def test_more_bytes_diverge_less_and_both_are_kept_to(results: list[SearchResult]) -> None:
    assert all(result.bytes <= size for result, size in zip(results, SIZES, strict=True))
    # a step from one choice to the next is at most 1% of the model here
    assert all(result.bytes > 0.98 * size for result, size in zip(results, SIZES, strict=True))
    assert results[1].loss < results[0].loss
    assert len({name_of(choice) for choice in results[0].chosen.values()}) > 1


def test_the_recipe_makes_what_was_promised(
    results: list[SearchResult], work: Path, shipped_artifact: Path, tmp_path: Path
) -> None:
    (tmp_path / "recipe.yaml").write_text(results[0].recipe.to_yaml(), encoding="utf-8")
    compilation = optimize(
        shipped_artifact, tmp_path / "recipe.yaml", tmp_path / "made", run=False, quality_tokens=0, statistics=work
    )
    assert compilation.manifest.weights is not None
    # besides weights a model has tables of formats and a few constants
    assert compilation.manifest.weights.bytes == pytest.approx(results[0].bytes, rel=0.01)


def test_what_was_measured_is_not_measured_again(
    work: Path, shipped_artifact: Path, results: list[SearchResult]
) -> None:
    (file,) = work.glob("search-*.jsonl")
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    # cut off in the middle of the last line
    file.write_text("".join(lines)[:-40], encoding="utf-8")
    stages: list[str] = []
    second_run = run(shipped_artifact, SIZES[0], work, on_stage=lambda stage, count=0, total=None: stages.append(stage))
    assert [stage for stage in stages if stage.startswith("rounding")] == [
        f"rounding {json.loads(lines[-1])['weight']}"
    ]
    assert file.read_text(encoding="utf-8") == "".join(lines)
    assert second_run == results[0]


def logits_of(folder: Path, texts: list[IntArray]) -> list[Array]:
    session, graph = open_session(folder / artifact.MODEL), artifact.read(folder).model.graph
    names = {port.name for port in session.get_inputs()}
    feeds = [task_of(graph).text_feeds(graph, text[None, :-1]) for text in texts]
    return [run_session(session, ["logits"], {n: x for n, x in feed.items() if n in names})[0][0] for feed in feeds]


def test_a_mixture_is_judged_as_the_artifact_that_it_will_be(
    work: Path, shipped_artifact: Path, tmp_path: Path
) -> None:
    """A mixture's matrices are those that the recipe makes, also in the embedding that is tied to the lm_head."""
    options = ("activations=float32", "linear.format=nl4", "linear.group=64", "lm_head.format=nl3", "lm_head.group=64")
    floats = recipe(*(f"quantize_weights.{option}" for option in options))
    result = run(shipped_artifact, None, work, recipe=floats, mixtures=MIXTURES)
    assert 2 < result.judged_mixtures <= 2 + MIXTURES.candidates
    # the lm_head, which is the embedding too, deserves more bits
    assert result.recipe_loss is not None
    assert result.held_out_loss is not None
    assert result.recipe_held_out_loss is not None
    assert result.loss < result.recipe_loss
    optimize(shipped_artifact, result.recipe, tmp_path / "made", run=False, quality_tokens=0, statistics=work)
    windows = texts_of(artifact.read(shipped_artifact).companions, CALIBRATION, None)
    texts = [text[begin : begin + 65] for begin in (0, 64) for text in windows]
    comparison = Comparison()
    pairs = zip(logits_of(shipped_artifact, texts), logits_of(tmp_path / "made", texts), texts, strict=True)
    for before, after, text in pairs:
        comparison.add(log_probabilities(before), after, text[1:])
    # the same codes, in another order of summation
    assert comparison.columns()[2].mean() == pytest.approx(result.loss, rel=1e-3)


def test_mixtures_that_were_judged_are_not_judged_again(work: Path, shipped_artifact: Path) -> None:
    options = {"mixtures": MIXTURES.model_copy(update={"tokens": 128})}
    first = run(shipped_artifact, SIZES[0], work, **options)
    (file,) = work.glob("mixtures-*-128.jsonl")
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    file.write_text("".join(lines[:-1]), encoding="utf-8")
    second = run(shipped_artifact, SIZES[0], work, **options)
    assert file.read_text(encoding="utf-8") == "".join(lines)
    assert second == first


def test_what_cannot_be_searched_is_refused(work: Path, shipped_artifact: Path, results: list[SearchResult]) -> None:
    with pytest.raises(InputError, match="the smallest choices take"):
        run(shipped_artifact, 1_000_000, work)
    with pytest.raises(InputError, match="the bytes of the recipe small are not known"):
        search(shipped_artifact, None, work, recipe=recipe(), choices=FORMATS, tokens=64)
    with pytest.raises(InputError, match="has no step quantize_weights"):
        run(shipped_artifact, 2_000_000, work, recipe="rotate")
    with pytest.raises(InputError, match="is no format with a group"):
        choice_of("nl9:64")
    strange = results[0].recipe.setting("quantize_weights", matrices={"no.weight": {"format": "nl4"}})
    with pytest.raises(InputError, match="weights that no product has, the first to no.weight"):
        optimize(shipped_artifact, strange, run=False, quality_tokens=0, statistics=work)


def matrix_of(name: str, tokens: int, *, is_rare: bool = False) -> CalibratedMatrix:
    return CalibratedMatrix(name, MATRIX, np.eye(64, dtype=np.float32), tokens, is_rare)


def test_an_expert_costs_as_much_as_it_is_reached() -> None:
    """Experts of the same weights and inputs share what all of them cost by their tokens; a rare one is as the mean."""
    matrices = [matrix_of("often", 300), matrix_of("seldom", 100), matrix_of("rare", 3, is_rare=True)]
    names: list[str] = []

    def divergence_of(choice: LinearFormat) -> float:
        names.append(name_of(choice))
        return 1.2

    rows = Rounder(NEAREST, "least_squares").rows(matrices, FORMATS, divergence_of)
    assert names == ["nl3:64"]
    coarsest = [row.losses["nl3:64"] for row in rows]
    # 300 : 100 : (300 + 100) / 2
    assert coarsest == pytest.approx([0.6, 0.2, 0.4])
    finer = [row.losses["nl4:64"] for row in rows]
    assert finer == pytest.approx([share * finer[0] / 0.6 for share in coarsest])
    assert finer[0] < 0.5 * coarsest[0]


def test_experts_none_of_which_is_known_share_evenly() -> None:
    rows = Rounder(NEAREST, "least_squares").rows(
        [matrix_of("one", 9, is_rare=True), matrix_of("none", 0, is_rare=True)], FORMATS, lambda choice: 1.0
    )
    assert [row.losses["nl3:64"] for row in rows] == pytest.approx([0.5, 0.5])


def test_each_expert_of_a_mixture_gets_a_format(make_artifact: Callable[[str], Path], tmp_path: Path) -> None:
    """Two layers of four experts, which a random router uses unevenly; tokens are bytes."""
    folder = shutil.copytree(make_artifact("mixtral"), tmp_path / "mixture")
    tokenizer = Tokenizer(models.BPE({letter: n for n, letter in enumerate(ByteLevel.alphabet())}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = recipe("quantize_weights.fewest_tokens=120", "quantize_weights.rounding=nearest")
    stages: list[str] = []
    result = search(
        folder,
        114_000,
        tmp_path / "work",
        recipe=settings,
        choices=FORMATS,
        tokens=64,
        mixtures=MixtureSearch(candidates=2, offspring=2, finalists=1, tokens=64),
        on_stage=lambda stage, count=0, total=None: stages.append(stage),
    )
    assert result.bytes <= 114_000
    experts = [name for name in result.chosen if "experts" in name]
    assert len(experts) == 2 * 4 * 2
    # attention and lm_head one by one, and two products of each layer with all their experts
    assert (
        len([stage for stage in stages if stage.startswith("rounding ") and stage != "rounding matrices"])
        == len(result.chosen) - len(experts) + 4
    )
    assert 0 < len(result.rare) < len(experts)
    assert all(tokens < 120 and name in experts for name, tokens in result.rare.items())
    assert {name_of(result.chosen[name]) for name in experts} == {"nl3:64", "nl4:64"}


def test_bytes_are_those_of_packed_codes_and_scales() -> None:
    assert stored_bytes(choice_of("nl4:64"), 128, 10) == 128 * 10 // 2 + 2 * 2 * 10
    assert stored_bytes(choice_of("uint4:32"), 128, 10) == 128 * 10 // 2 + (2 + 2) * 4 * 10
    # a byte for each scale and two for each column, where that is less, and codes are of no ONNX type
    assert stored_bytes(choice_of("nl4:32"), 128, 10, has_level_scales=True) == 128 * 10 // 2 + (4 + 2) * 10
    assert stored_bytes(choice_of("nl4:128"), 128, 10, has_level_scales=True) == stored_bytes(
        choice_of("nl4:128"), 128, 10
    )
    assert stored_bytes(choice_of("uint4:32"), 128, 10, has_level_scales=True) == stored_bytes(
        choice_of("uint4:32"), 128, 10
    )
    assert stored_bytes(choice_of("int3:column"), 128, 8) == 128 * 8 * 3 // 8 + 2 * 8
    # five digits of base 3 in a byte: 52 bytes for 256 codes
    assert stored_bytes(choice_of("ternary:64"), 128, 32) == 128 * 32 // 256 * 52 + 2 * 2 * 32
    assert name_of(choice_of("int3:column")) == "int3:column"


def test_the_database_refuses_what_is_no_row(tmp_path: Path) -> None:
    database = Database(tmp_path / "rows.jsonl")
    database.add(Row(weight="a", rows=2, columns=3, bytes={"nl4:64": 9}, losses={"nl4:64": 0.5}))
    assert Database(database.file).rows == database.rows
    database.file.write_text('{"weight": "a"}\n', encoding="utf-8")
    with pytest.raises(ValidationError):
        Database(database.file)


def test_the_command_writes_a_recipe(
    work: Path, shipped_artifact: Path, results: list[SearchResult], tmp_path: Path
) -> None:
    recipe_file = tmp_path / "mine.yaml"
    recipe_file.write_text(recipe().to_yaml(), encoding="utf-8")
    formats = [name_of(choice) for choice in FORMATS]
    COMMANDS["search"](
        shipped_artifact,
        tmp_path / "out.yaml",
        "2.4MB",
        recipe=str(recipe_file),
        formats=formats,
        tokens=64,
        candidates=0,
        work=work,
    )
    document = yaml.safe_load((tmp_path / "out.yaml").read_text(encoding="utf-8"))
    step = next(step for step in document["steps"] if step["step"] == "quantize_weights")
    assert {name: choice_of(f"{c['format']}:{c['group']}") for name, c in step["matrices"].items()} == results[0].chosen
