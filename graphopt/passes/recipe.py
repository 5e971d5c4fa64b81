"""A recipe: what to do to a model, as typed data. Presets ship with the package; any recipe is a YAML file."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SerializeAsAny, ValidationError, field_validator

from graphopt.errors import InputError
from graphopt.ort.session import ACCURACY_LEVEL
from graphopt.passes import PASSES
from graphopt.passes.base import Pass
from graphopt.passes.phases import PHASES, Phase
from graphopt.quantization.statistics.options import CalibrationOptions

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphopt.passes.context import Statistics
    from graphopt.util.targets import ChosenTarget, Target


def _of_registry(step: object) -> object:
    """Return the pass that a mapping names by its ``step``, with the options beside it."""
    if isinstance(step, Pass) or not isinstance(step, Mapping):
        return step
    name = str(step.get("step"))
    if name not in PASSES:
        raise ValueError(f"there is no step {name!r}; known are {', '.join(PASSES)}")
    return PASSES[name].model_validate(step)


Step = Annotated[SerializeAsAny[Pass], BeforeValidator(_of_registry)]
"""A pass with its options, as a recipe writes it: ``step`` names it, see :data:`graphopt.passes.PASSES`."""


def _named_recipe(recipe: object) -> object:
    """Return the preset that a text names."""
    if not isinstance(recipe, str):
        return recipe
    names = _preset_recipes()
    if recipe not in names:
        raise ValueError(f"there is no preset {recipe!r}; known are {', '.join(names)}")
    return names[recipe]


class Recipe(BaseModel):
    """What to do to a model.

    Attributes:
        name: what reports call it.
        description: one line for a list.
        steps: the passes with their options, in order: phase by phase, see :data:`graphopt.passes.phases.PHASES`.
        activations: to what quantized products round their inputs at run time: ``int8`` is the fast path, ``float32``
            leaves them alone, as ``--target ort-cuda`` does where a recipe does not say: kernels on GPUs are faster so.
            For onnxruntime's own kernel it is a session entry, not part of the graph: graphopt's session sets it from
            the manifest, any other session has to. Products that graphopt made say it in the graph, and a step may say
            otherwise for them.
        calibration: the text that statistics are collected on, where a step needs them.
        graphs: of a model of several graphs: recipes for others than the first, by the names of their folders, such as
            ``vision``; each a preset's name or a recipe. Others take this recipe, as far as its steps are for them.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    description: str = ""
    steps: tuple[Step, ...]
    activations: Literal["int8", "float32"] = "int8"
    calibration: CalibrationOptions = CalibrationOptions()
    graphs: dict[str, Annotated[Recipe, BeforeValidator(_named_recipe)]] = Field(default={})

    @field_validator("graphs")
    @classmethod
    def _one_level(cls, graphs: dict[str, Recipe]) -> dict[str, Recipe]:
        name = next((name for name, recipe in graphs.items() if recipe.graphs), None)
        if name is not None:
            raise ValueError(f"the recipe for {name} has recipes for graphs of its own: give all of them side by side")
        return graphs

    @field_validator("steps")
    @classmethod
    def _in_order(cls, steps: tuple[Pass, ...]) -> tuple[Pass, ...]:
        right = sorted(steps, key=_position)
        if [step.name for step in steps] != [step.name for step in right]:
            raise ValueError(
                f"the steps are out of order: {', '.join(step.name for step in right)} is the right one; phases come "
                f"in the order {', '.join(PHASES)}"
            )
        return steps

    def passes(self) -> list[Pass]:
        """Return the passes of the recipe, ready to run."""
        return [self._with_activations(step) for step in self.steps]

    @property
    def phases(self) -> set[Phase]:
        """The phases of the steps."""
        return {step.phase() for step in self.steps}

    def options_of(self, name: str) -> dict[str, Any]:
        """Return the options of the first step ``name``; none where there is no such step."""
        step = next((step for step in self.steps if step.name == name), None)
        return {} if step is None else dict(step)

    def with_lower(self, target: ChosenTarget | None = None) -> Recipe:
        """Return the recipe with a step ``lower``, which every recipe has in the end, unless it has one.

        Args:
            target: what ``lower`` is for; passes whose ``targets`` name it are added. ``None`` leaves a step ``lower``
                as it is, and adds one for ``portable``.
        """
        recipe = self.adding("lower")
        if target is None:
            return recipe
        kind, _, instructions = target.partition(":")
        recipe = recipe.setting("lower", target=kind, **({"instructions": instructions} if instructions else {}))
        if kind == "ort-cuda" and "activations" not in self.model_fields_set:
            recipe = recipe.model_copy(update={"activations": "float32"})
        return recipe._adding_all(step for step in PASSES.values() if kind in step.targets)

    def on_this_machine(self) -> Recipe:
        """Return the recipe with what its steps leave to the machine that optimizes."""
        return self.model_copy(update={"steps": tuple(step.on_this_machine() for step in self.steps)})

    def fitting(self, graph: ir.Graph) -> Recipe:
        """Return the recipe with all steps that it needs for ``graph`` and lacks, see :meth:`Pass.is_needed`."""
        return self._adding_all(step for step in PASSES.values() if step.is_needed(graph, self))

    def _adding_all(self, steps: Iterable[type[Pass]]) -> Recipe:
        return functools.reduce(lambda recipe, step: recipe.adding(step.name), steps, self)

    def adding(self, name: str) -> Recipe:
        """Return the recipe with the step ``name`` and its defaults at its place, unless it has one.

        Raises:
            InputError: there is no such step.
        """
        if any(step.name == name for step in self.steps):
            return self
        if name not in PASSES:
            raise InputError(f"there is no step {name!r}", remedy=f"known are {', '.join(PASSES)}")
        steps = sorted([*self.steps, PASSES[name]()], key=_position)
        return self.model_copy(update={"steps": tuple(steps)})

    def setting(self, name: str, **options: object) -> Recipe:
        """Return the recipe with other options in each step called ``name``.

        Raises:
            InputError: the recipe has no such step, the step has no such option, or the option not such a value.
        """
        if all(step.name != name for step in self.steps):
            raise InputError(
                f"the recipe {self.name} has no step {name!r}",
                remedy=f"it has {', '.join(step.name for step in self.steps)}; add one with --add {name}",
            )
        steps = tuple(_with_options(step, options) if step.name == name else step for step in self.steps)
        return self.model_copy(update={"steps": steps})

    @property
    def target(self) -> Target:
        """What the recipe makes a model for: the target of its step ``lower``, ``portable`` without one."""
        target: Target = self.options_of("lower").get("target", "portable")
        return target

    def with_files_from(self, folder: Path) -> Recipe:
        """Return the recipe with each file that a step names taken from ``folder``, where it lies there."""
        steps = tuple(step.with_files_from(folder) for step in self.steps)
        graphs = {name: recipe.with_files_from(folder) for name, recipe in self.graphs.items()}
        calibration = self.calibration.with_files_from(folder)
        return self.model_copy(update={"steps": steps, "calibration": calibration, "graphs": graphs})

    def self_contained(self, statistics: Statistics) -> Recipe:
        """Return the recipe with what was measured in place of the files that hold it.

        Raises:
            InputError: a file is not there, or holds something else.
        """
        return self.model_copy(update={"steps": tuple(step.self_contained(statistics) for step in self.steps)})

    def session_entries(self) -> dict[str, str]:
        """Return the onnxruntime session entries that the recipe means."""
        return {ACCURACY_LEVEL: "0" if self.activations == "float32" else "4"}

    def _with_activations(self, step: Pass) -> Pass:
        """Return ``step`` with what it leaves to the recipe: an option ``activations`` that is ``None``."""
        is_open = "activations" in type(step).model_fields and getattr(step, "activations") is None  # noqa: B009
        return step.model_copy(update={"activations": self.activations}) if is_open else step

    def to_yaml(self) -> str:
        """Write the recipe as YAML, every option spelled out; :func:`load_recipe` reads it back as the same recipe."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


def _position(step: Pass) -> int:
    return list(PASSES).index(step.name)


def _with_options(step: Pass, options: Mapping[str, object]) -> Pass:
    try:
        return type(step).model_validate(step.model_dump() | dict(options))
    except ValidationError as error:
        raise InputError(
            f"the step {step.name} cannot be set so: {_problems(error)}",
            remedy=f"its options are {', '.join(name for name in type(step).model_fields)}",
        ) from error


def imports_of(graph: ir.Graph) -> list[Pass]:
    """Return the passes of the phase ``importing`` that a graph needs, with their default options."""
    recipe = Recipe(name="import", steps=())
    return [step() for step in PASSES.values() if step.phase() == "importing" and step.is_needed(graph, recipe)]


def presets() -> dict[str, Recipe]:
    """Return the recipes that ship with the package, by name."""
    return dict(_preset_recipes())


@functools.cache
def _preset_recipes() -> dict[str, Recipe]:
    files = [file for file in resources.files("graphopt.passes.preset_files").iterdir() if file.name.endswith(".yaml")]
    recipes = [_parse(file.read_text(encoding="utf-8"), file.name) for file in files]
    return {recipe.name: recipe for recipe in sorted(recipes, key=lambda recipe: recipe.name)}


def load_recipe(name_or_file: str | Path | Recipe, add: Sequence[str] = (), options: Sequence[str] = ()) -> Recipe:
    """Return a preset by its name, or read a YAML file.

    Args:
        name_or_file: which.
        add: steps to add, each at its place and with its defaults.
        options: what to set in steps: ``STEP.OPTION=VALUE``, the value in YAML; ``STEP.OPTION.KEY`` reaches inside.

    Raises:
        InputError: there is no such preset, file, step or option, or the file is not a recipe; names the key that is
            wrong.
    """
    recipe = _load(name_or_file)
    for name in add:
        recipe = recipe.adding(name)
    for text in options:
        recipe = _set(recipe, text)
    return recipe


def _load(name_or_file: str | Path | Recipe) -> Recipe:
    if isinstance(name_or_file, Recipe):
        return name_or_file
    names = _preset_recipes()
    if str(name_or_file) in names:
        return names[str(name_or_file)]
    path = Path(name_or_file)
    if not path.is_file():
        raise InputError(
            f"there is no recipe {str(name_or_file)!r}", remedy=f"give a YAML file, or one of {', '.join(names)}"
        )
    return _parse(path.read_text(encoding="utf-8"), str(path)).with_files_from(path.parent)


def _set(recipe: Recipe, text: str) -> Recipe:
    """Return ``recipe`` with one option set, such as ``quantize_weights.linear.group=32``."""
    setting, equals, value = text.partition("=")
    name, *path = setting.split(".")
    if not equals or not path:
        raise InputError(f"{text!r} sets no option", remedy="say STEP.OPTION=VALUE, such as rotate.seed=1")
    try:
        content: Any = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise InputError(f"the value of {setting} is not YAML: {error}") from error
    first, *inner = path
    recipe = recipe.adding(name) if name == "lower" else recipe  # every recipe has it in the end
    step = next((step for step in recipe.steps if step.name == name), None)
    if step is not None:
        content = _set_at(step.model_dump(mode="json").get(first), inner, content)
    return recipe.setting(name, **{first: content})


def _set_at(tree: Any, path: Sequence[str], value: Any) -> Any:
    """Return the mapping ``tree`` with ``value`` at ``path``."""
    if not path:
        return value
    names = tree if isinstance(tree, dict) else {}
    return names | {path[0]: _set_at(names.get(path[0]), path[1:], value)}


def _parse(text: str, file: str) -> Recipe:
    try:
        content: Any = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(f"the recipe is not YAML: {error}", file=file) from error
    try:
        return Recipe.model_validate(content)
    except ValidationError as error:
        raise InputError(
            f"the recipe cannot be used: {_problems(error)}",
            file=file,
            remedy="`graphopt recipes NAME` prints one with all keys",
        ) from error


def _problems(error: ValidationError) -> str:
    return "; ".join(
        f"{'.'.join(map(str, problem['loc'])) or 'recipe'}: {problem['msg']}" for problem in error.errors()
    )
