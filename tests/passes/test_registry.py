"""A pass is one file in the folder of its phase: nothing else has to name it."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

import graphopt.passes.algebra
from graphopt.artifact import artifact
from graphopt.cli import app
from graphopt.passes import PASSES
from graphopt.passes.phases import PHASES
from graphopt.passes.recipe import load_recipe
from tests.registry_files import file_added

FILE = '''
"""Names end with an exclamation mark."""
from typing import ClassVar
import onnx_ir as ir
from graphopt.graph.diagnostics import Effect
from graphopt.passes.base import Pass
from graphopt.passes.context import Context

class Shout(Pass):
    """x -> x!

    Attributes:
        loudly: whether names end with an exclamation mark.
    """

    name: ClassVar[str] = "shout"
    effect: ClassVar[Effect] = "exact"
    after: ClassVar[tuple[str, ...]] = ("fold_norms", "rotate")

    loudly: bool = True

    def rewrite(self, model: ir.Model, context: Context) -> None:
        """Rename the graph."""
        model.graph.name = f"{model.graph.name}!" if self.loudly else model.graph.name
'''


def test_a_file_in_the_folder_of_a_phase_is_a_step_that_recipes_know(tmp_path: Path) -> None:
    with file_added(PASSES, "graphopt.passes.algebra", tmp_path, FILE):
        recipe = load_recipe("rotate-int4-rtn", add=["shout"], options=["shout.loudly=false"])
        assert [step.name for step in recipe.steps][:4] == ["canonicalize", "fold_norms", "rotate", "shout"]
        assert recipe.steps[3].model_dump()["loudly"] is False
    assert "shout" not in PASSES


def test_a_new_pass_is_run_from_the_command_line_with_its_options(llama_artifact: Path, tmp_path: Path) -> None:
    names = {}
    with file_added(PASSES, "graphopt.passes.algebra", tmp_path, FILE):
        for loudly in ("true", "false"):
            out = tmp_path / loudly
            options = ["--recipe", "rotate", "--output", str(out), "--add", "shout", "--set", f"shout.loudly={loudly}"]
            result = CliRunner().invoke(app, ["optimize", str(llama_artifact), *options, "--no-run"])
            assert result.exit_code == 0, result.output
            recipe = artifact.read(out).manifest.recipe
            assert recipe is not None
            assert {"step": "shout", "loudly": loudly == "true"} in recipe["steps"]
            names[loudly] = str(artifact.read(out).model.graph.name)
    assert names["true"] == f"{names['false']}!"


def test_passes_are_listed_by_phase_and_each_behind_those_it_comes_after() -> None:
    phases = [PHASES.index(each.phase()) for each in PASSES.values()]
    assert phases == sorted(phases)
    places = {name: place for place, name in enumerate(PASSES)}
    for name, each in PASSES.items():
        assert all(places[other] < places[name] for other in each.after), name


def test_each_phase_has_a_folder_that_says_what_it_is() -> None:
    root = Path(graphopt.passes.algebra.__file__).parents[1]
    for phase in PHASES:
        assert (root / phase / "__init__.py").read_text(encoding="utf-8").startswith(f'"""Phase ``{phase}``: ')
