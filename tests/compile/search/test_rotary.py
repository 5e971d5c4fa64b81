"""Rotary factors that a search finds: the generations, what is measured, and the recipe in the end."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from graphopt.artifact import artifact
from graphopt.cli.commands import COMMANDS
from graphopt.compile.search import FoundFactors, search_rope
from graphopt.compile.search.evolution import Breeder, Candidate, Evolution, evolve
from graphopt.compile.search.rotary_inputs import Turnable
from graphopt.errors import InputError
from graphopt.ort.runner import Runner
from graphopt.passes.lift.rescale_rope import RescaleRope
from graphopt.passes.recipe import load_recipe
from graphopt.util.stdlib_text import held_out_text
from tests.families import POSITIONS, VOCABULARY
from tests.graphs import compile_artifact, logits_of, residual_model, run_pass

SMALL = Evolution(population=6, parents=3, mutations=2, crossovers=2, generations=2)
PAIRS = 8


@pytest.mark.parametrize("seed", range(5))
def test_factors_stay_in_range_and_never_decrease(seed: int) -> None:
    breeder = Breeder(Evolution(seed=seed, chance=0.9), 4, [1.0, 1.1])
    first = breeder.clip(Candidate(factors=(0.5, 2.0, 1.5, 9.0)))
    assert first.factors == (1.0, 2.0, 2.0, 5.0)
    second = breeder.clip(Candidate(factors=(1.0, 1.0, 4.0, 4.0)))
    variants = set()
    for _ in range(50):
        for candidate in (breeder.mutate(first), breeder.cross([first, second])):
            assert list(candidate.factors) == sorted(candidate.factors)
            assert (
                1 <= min(candidate.factors) <= max(candidate.factors) <= 5
            )  # 1.25 times the factor of 4, where factors end
            assert candidate.attention_factor in (1.0, 1.1)
            variants.add(candidate)
    assert len(variants) > 40


def test_generations_come_nearer_to_the_best() -> None:
    goal = np.array([1.0, 1.5, 3.0, 4.5])

    def measure(candidate: Candidate) -> float:
        return float(((np.array(candidate.factors) - goal) ** 2).sum()) + candidate.first / 100

    starts = [Candidate(factors=(4.0,) * 4), Candidate(factors=(1.0,) * 4, first=8)]
    calls: list[int] = []
    evolution = Evolution(generations=20)
    best, value = evolve(starts, 4, evolution, measure, lambda _, count=0, total=None: calls.append(count))
    assert value == measure(best) < 0.1 < min(map(measure, starts))
    assert calls == list(range(len(calls)))
    assert len(calls) <= evolution.candidates
    assert evolve(starts, 4, evolution, measure) == (best, value)


def test_what_a_candidate_computes_is_what_the_pass_makes_of_it(llama_artifact: Path, tmp_path: Path) -> None:
    """The search measures a graph with inputs: it must be the model that the recipe makes."""
    model = artifact.read(llama_artifact).model
    run_pass(model, "canonicalize")
    turnable = Turnable(model)
    factors = tuple(np.linspace(1, 4, PAIRS).round(2).tolist())
    candidate = Candidate(factors=factors, first=4, attention_factor=1.1)
    ids = np.random.default_rng(0).integers(0, VOCABULARY, 61)
    with Runner().open_model(turnable.model) as session:
        nats = turnable.nats(session, candidate, [ids], 20)
        plain = turnable.nats(session, Candidate(factors=(1.0,) * PAIRS), [ids], 20)
    run_pass(model, "rescale_rope", method="longrope", factor=2, trained=POSITIONS, **candidate.model_dump())
    logits = logits_of(model, ids[None, :-1], tmp_path / "made")[0].astype(np.float64)
    token_losses = np.log(np.exp(logits).sum(-1)) - logits[np.arange(60), ids[1:]]
    # float32 logits of two graphs that round alike
    assert nats == pytest.approx(token_losses[20:].mean(), abs=1e-5)
    assert abs(nats - plain) > 1e-3


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rope")
    # Without a text of its own a search reads all of Python's source.
    (folder / "text.py").write_text(held_out_text()[:8000])
    return folder


@pytest.fixture(scope="module")
def found_factors(llama_artifact: Path, work: Path) -> FoundFactors:
    return search_rope(llama_artifact, 1.5, work, evolution=SMALL, texts=2, text=work / "text.py")


def test_the_recipe_holds_the_fittest(found_factors: FoundFactors, llama_artifact: Path, tmp_path: Path) -> None:
    assert set(found_factors.starts) == {"linear", "ntk", "yarn"}
    assert found_factors.nats <= min(found_factors.starts.values())
    (tmp_path / "recipe.yaml").write_text(found_factors.recipe.to_yaml())
    recipe = load_recipe(tmp_path / "recipe.yaml")
    assert recipe == found_factors.recipe
    step = recipe.steps[1]
    assert isinstance(step, RescaleRope)
    assert (step.method, step.factor, step.trained, len(step.factors)) == ("longrope", 1.5, POSITIONS, PAIRS)
    (tmp_path / "work").mkdir()
    _, reports = compile_artifact(artifact.read(llama_artifact), recipe, tmp_path / "work")
    assert [report.name for report in reports if report.changes][:2] == ["canonicalize", "rescale_rope"]


def test_a_search_that_was_cut_off_goes_on(found_factors: FoundFactors, llama_artifact: Path, work: Path) -> None:
    (file,) = work.glob("rope-*.jsonl")
    whole = file.read_text()
    assert found_factors.measured == len(whole.splitlines())
    file.write_text(whole[:-20])
    assert search_rope(llama_artifact, 1.5, work, evolution=SMALL, texts=2, text=work / "text.py") == found_factors
    assert file.read_text() == whole


def test_what_cannot_be_searched_is_refused(llama_artifact: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing to search: the model has 128 positions, and the factor is 1"):
        search_rope(llama_artifact, 1, tmp_path)
    (tmp_path / "short.txt").write_text("import os\n" * 20)
    with pytest.raises(InputError, match=r"no sequence of 513 tokens \[file=.*short.txt\]"):
        search_rope(llama_artifact, 4, tmp_path, text=tmp_path / "short.txt")


def test_a_model_without_rotary_positions_is_refused() -> None:
    with pytest.raises(InputError, match="no rotary factors to search: the graph has no RotaryEmbedding"):
        Turnable(residual_model())


def test_the_command_writes_the_recipe(
    found_factors: FoundFactors, llama_artifact: Path, work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"population": 6, "mutations": 2, "crossovers": 2, "generations": 2}
    COMMANDS["search-rope"](
        llama_artifact, 1.5, tmp_path / "out.yaml", text=work / "text.py", texts=2, work=work, as_json=True, **sizes
    )
    assert load_recipe(tmp_path / "out.yaml") == found_factors.recipe
    assert json.loads(capsys.readouterr().out)["nats"] == found_factors.nats
