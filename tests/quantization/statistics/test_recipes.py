"""Recipes that need statistics: collected on the way, shared, verified, refused."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import pytest

from graphopt.artifact.artifact import DATA, MODEL
from graphopt.compile.calibration.inputs import collect
from graphopt.compile.pipeline import optimize
from graphopt.compile.replay import verify
from graphopt.compile.shards import assemble, evaluate_shard
from graphopt.errors import InputError
from graphopt.graph.weights.evaluator import workers
from graphopt.passes.codes.quantize_weights import STATISTICS, STORAGE
from graphopt.passes.recipe import Recipe, load_recipe
from graphopt.quantization.statistics.options import CalibrationOptions

TEXT = "def add(a, b):\n    return a + b\n\n" * 40


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(TEXT)
    return file


@pytest.fixture(scope="module")
def processes() -> Iterator[Executor]:
    """Two processes, which import for six seconds; in tests/compile/test_resume.py `optimize` starts its own."""
    with workers(2) as executor:
        assert executor is not None
        yield executor


def recipe(text: Path | None, name: str = "rotate-int4-rtn", rounding: str = "gptq", **settings: Any) -> Recipe:
    options = [
        f"quantize_weights.rounding={rounding}",
        *(f"quantize_weights.{key}={value}" for key, value in settings.items()),
    ]
    calibration = CalibrationOptions(text=text, windows=4, window=64)
    return load_recipe(name, options=options).model_copy(update={"calibration": calibration})


def files(folder: Path) -> tuple[bytes, bytes]:
    return (folder / MODEL).read_bytes(), (folder / DATA).read_bytes()


def facts(result: Any) -> list[Any]:
    report = next(report for report in result.manifest.passes if report.name == "quantize_weights")
    return [change.what for change in report.changes]


@pytest.mark.parametrize("inputs", ["original", "rounded"])
def test_any_number_of_jobs_shards_and_verify_agree(
    inputs: str, llama_artifact: Path, text: Path, processes: Executor, tmp_path: Path
) -> None:
    rounding_recipe = recipe(text, inputs=inputs)
    result = optimize(llama_artifact, rounding_recipe, tmp_path / "one")
    assert {fact.figures.get("rounding") for fact in facts(result) if fact.code == STORAGE.code} == {"gptq", None}
    (statistics_fact,) = [fact for fact in facts(result) if fact.code == STATISTICS.code]
    assert statistics_fact.figures["tokens"] == 4 * 64
    statistics_folder = tmp_path / "kept"
    statistics = collect(llama_artifact, rounding_recipe, statistics_folder)
    assert len(statistics) == statistics_fact.figures["products"]
    # one that may not run the model finds them there, and another folder of weights, made by two processes, is the same
    optimize(llama_artifact, rounding_recipe, tmp_path / "two", jobs=processes, run=False, statistics=statistics_folder)
    assert files(tmp_path / "two") == files(tmp_path / "one")
    for number in range(2):
        evaluate_shard(llama_artifact, rounding_recipe, tmp_path / "three", number, 2, statistics=statistics_folder)
    assemble(tmp_path / "three", run=False, statistics=statistics_folder)
    assert files(tmp_path / "three") == files(tmp_path / "one")
    checks = verify(llama_artifact, tmp_path / "one").checks
    assert [check.status for check in checks if check.name == "replay"] == ["proved"]
    assert verify(llama_artifact, tmp_path / "two", run=False, statistics=statistics_folder)
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["kept", "one", "three", "two"]


# Optimizes in two children of a process without threads, which import nothing. One kills itself when it collects for
# the n-th time, the other when it rounds; what is there then is printed for each.
KILLED_RUNS = """
import json, os, signal, sys
from pathlib import Path
from graphopt.compile.pipeline import optimize
from graphopt.passes.recipe import load_recipe
from graphopt.quantization.rounding.methods.gptq import GPTQ
from graphopt.quantization.statistics.moments import Moments

source, recipe, out, left = *sys.argv[1:4], int(sys.argv[4])

def killing(function):
    def called(*args, **kwargs):
        global left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return called

found = []
for kind, name in ((Moments, "add"), (GPTQ, "round")):
    child = os.fork()
    if not child:
        setattr(kind, name, killing(getattr(kind, name)))
        optimize(source, load_recipe(recipe), out)
        os._exit(0)
    found.append([os.waitpid(child, 0)[1], sorted(os.listdir(Path(out).parent))])
print(json.dumps(found))
"""


def test_killed_while_it_collects_or_rounds_it_makes_the_same_bytes(
    llama_artifact: Path, text: Path, tmp_path: Path
) -> None:
    recipe_file = tmp_path / "recipe.yaml"
    recipe_file.write_text(recipe(text).to_yaml())
    optimize(llama_artifact, load_recipe(recipe_file), tmp_path / "whole")
    arguments = [str(llama_artifact), str(recipe_file), str(tmp_path / "out"), "3"]
    process = subprocess.run(
        [sys.executable, "-c", KILLED_RUNS, *arguments], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr[-500:]
    assert json.loads(process.stdout) == [[signal.SIGKILL, [".out-work", "recipe.yaml", "whole"]]] * 2
    optimize(llama_artifact, load_recipe(recipe_file), tmp_path / "out")
    assert files(tmp_path / "out") == files(tmp_path / "whole")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out", "recipe.yaml", "whole"]


def test_products_make_up_for_those_before_them(llama_artifact: Path, text: Path, tmp_path: Path) -> None:
    divergences = {}
    for inputs in ("original", "rounded"):
        rounding_recipe = recipe(text, inputs=inputs, linear="{format: int3, group: 64}", activations="float32")
        result = optimize(llama_artifact, rounding_recipe, tmp_path / inputs)
        divergences[inputs] = next(check.figures for check in result.manifest.checks if check.name == "quality")[
            "kl_mean"
        ]
    assert 0 < divergences["rounded"] < divergences["original"]
    with pytest.raises(InputError, match="it goes with inputs: original"):
        recipe(text, inputs="rounded", low_rank=4)


def test_branches_of_what_was_lost_run_and_bring_the_model_nearer(
    llama_artifact: Path, text: Path, processes: Executor, tmp_path: Path
) -> None:
    divergences = {}
    for rank in (0, 8):
        result = optimize(
            llama_artifact,
            recipe(text, "nf4-rtn", "nearest", low_rank=rank, linear="{format: int3, group: 64}"),
            tmp_path / str(rank),
            target="ort-cpu",
        )
        divergences[rank] = next(check.figures for check in result.manifest.checks if check.name == "quality")[
            "kl_mean"
        ]
    assert 0 < divergences[8] < divergences[0]
    (rank_of_fact,) = {fact.figures.get("beside") for fact in facts(result) if fact.code == STORAGE.code} - {None}
    assert rank_of_fact == 8
    optimize(
        llama_artifact,
        recipe(text, "nf4-rtn", "nearest", low_rank=8, linear="{format: int3, group: 64}"),
        tmp_path / "two",
        target="ort-cpu",
        jobs=processes,
    )
    assert files(tmp_path / "two") == files(tmp_path / "8")


def test_formats_and_methods_share_what_was_collected(llama_artifact: Path, text: Path, tmp_path: Path) -> None:
    collect(llama_artifact, recipe(text, "int4-rtn"), tmp_path)
    for name, rounding in (
        ("fp6-rtn", "gptq"),
        ("nf4-rtn", "weighted"),
        ("w4a8-rtn", "{method: gptq, order: natural}"),
    ):
        result = optimize(llama_artifact, recipe(text, name, rounding), run=False, statistics=tmp_path)
        assert any(fact.figures.get("rounding") in rounding for fact in facts(result) if "rounding" in fact.figures)
    assert len(list(tmp_path.iterdir())) == 1
    with pytest.raises(InputError, match="they are not kept"):
        optimize(llama_artifact, recipe(text, "rotate-int4-rtn"), run=False, statistics=tmp_path)


def test_what_cannot_be_run_says_what_to_do(llama_artifact: Path, text: Path, tmp_path: Path) -> None:
    for attempt in (
        lambda: optimize(llama_artifact, recipe(text), tmp_path / "out", run=False),
        lambda: evaluate_shard(llama_artifact, recipe(text), tmp_path / "out", 0, 2),
    ):
        with pytest.raises(InputError, match=r"needs statistics .* not kept.*graphopt calibrate MODEL -r RECIPE"):
            attempt()
    with pytest.raises(InputError, match=r"the recipe int4-rtn needs no statistics.*quantize_weights.rounding=gptq"):
        collect(llama_artifact, "int4-rtn", tmp_path)
    with pytest.raises(InputError, match="the text to calibrate on cannot be read"):
        collect(llama_artifact, recipe(tmp_path / "none.txt"), tmp_path)
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    with pytest.raises(InputError, match="the text to calibrate on is empty"):
        collect(llama_artifact, recipe(empty), tmp_path)


def test_too_few_tokens_are_rounded_to_nearest_and_said_so(llama_artifact: Path, tmp_path: Path) -> None:
    short_text = tmp_path / "one.txt"
    short_text.write_text("a")
    result = optimize(llama_artifact, recipe(short_text), tmp_path / "few")
    optimize(llama_artifact, "rotate-int4-rtn", tmp_path / "nearest")
    assert (tmp_path / "few" / DATA).read_bytes() == (tmp_path / "nearest" / DATA).read_bytes()
    (fact, *_) = [fact for fact in facts(result) if "few" in fact.figures]
    assert "its inputs were seen for 1 tokens only, too few for gptq" in str(fact)
    singular = optimize(llama_artifact, recipe(short_text, fewest_tokens=0), tmp_path / "singular")
    assert any(fact.figures.get("rounding") == "gptq" for fact in facts(singular))


def test_an_encoder_is_calibrated_on_default_text(bert_artifact: Path, tmp_path: Path) -> None:
    result = optimize(bert_artifact, recipe(None, "int4-rtn"), tmp_path / "out")
    figures = [check.figures for check in result.manifest.checks if check.name == "hidden states"][-1]
    nearest = optimize(bert_artifact, "int4-rtn").manifest.checks
    before = [check.figures for check in nearest if check.name == "hidden states"][-1]
    assert figures["cosine_with_start_mean"] > 0.9 * before["cosine_with_start_mean"]


def test_other_statistics_than_recorded_do_not_verify(llama_artifact: Path, text: Path, tmp_path: Path) -> None:
    optimize(llama_artifact, recipe(text), tmp_path / "out")
    text.write_text(TEXT.replace("add", "sub"))
    try:
        with pytest.raises(InputError, match=r"chosen by statistics .* come out differently here.*--statistics FOLDER"):
            verify(llama_artifact, tmp_path / "out")
    finally:
        text.write_text(TEXT)


def test_the_text_is_looked_for_beside_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("x")
    (tmp_path / "r.yaml").write_text("name: r\nsteps: []\ncalibration: {text: mine.txt, windows: 2}\n")
    assert load_recipe(tmp_path / "r.yaml").calibration == CalibrationOptions(text=tmp_path / "mine.txt", windows=2)
