"""A recipe: what to do to a model, as typed data. Presets ship with the package; any recipe is a YAML file."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from graphopt.errors import InputError
from graphopt.passes import (
    PASSES,
    CanonicalizeOptions,
    EmulateQuantizationOptions,
    Float16Options,
    FoldNormsOptions,
    LastLogitsOptions,
    LowerOptions,
    MergeProductsOptions,
    PageKVOptions,
    Pass,
    QuantizeActivationsOptions,
    QuantizeKVOptions,
    QuantizeWeightsOptions,
    RotateOptions,
    SparseKVOptions,
    Target,
)
from graphopt.runtime import ACCURACY_LEVEL

Step = Annotated[
    CanonicalizeOptions
    | FoldNormsOptions
    | RotateOptions
    | QuantizeWeightsOptions
    | QuantizeActivationsOptions
    | EmulateQuantizationOptions
    | PageKVOptions
    | QuantizeKVOptions
    | SparseKVOptions
    | LastLogitsOptions
    | LowerOptions
    | MergeProductsOptions
    | Float16Options,
    Field(discriminator="step"),
]


class Recipe(BaseModel):
    """What to do to a model.

    Attributes:
        name: what reports call it.
        description: one line for a list.
        steps: the passes with their options, in order.
        activations: to what quantized products round their inputs at run time: ``int8`` is the fast path, ``float32``
            leaves them alone. For onnxruntime's own kernel it is a session entry, not part of the graph: graphopt's
            session sets it from the manifest, any other session has to. Products that graphopt made say it in the
            graph, and a step may say otherwise for them.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    description: str = ""
    steps: tuple[Step, ...]
    activations: Literal["int8", "float32"] = "int8"

    def passes(self) -> list[Pass[Any]]:
        """Return the passes of the recipe, ready to run."""
        return [PASSES[step.step](self._settled(step)) for step in self.steps]

    def lowered(self, target: Target) -> Recipe:
        """Return the recipe with a step ``lower`` for ``target``, which is added at the end where there is none.

        A step ``merge_products`` is added too, for any target but ``portable``; ``float16`` stays behind both.
        """
        narrow = tuple(step for step in self.steps if isinstance(step, Float16Options))
        steps = tuple(step for step in self.steps if step not in narrow)
        if not any(isinstance(step, LowerOptions) for step in steps):
            steps = (*steps, LowerOptions())
        if target != "portable" and not any(isinstance(step, MergeProductsOptions) for step in steps):
            steps = (*steps, MergeProductsOptions())
        update = {"target": target}
        lowered = [step.model_copy(update=update) if isinstance(step, LowerOptions) else step for step in steps]
        return self.model_copy(update={"steps": (*lowered, *narrow)})

    def with_last_logits(self) -> Recipe:
        """Return the recipe with the step ``last_logits`` at its end, unless it has it."""
        there = any(isinstance(step, LastLogitsOptions) for step in self.steps)
        return self if there else self.model_copy(update={"steps": (*self.steps, LastLogitsOptions())})

    def in_float16(self) -> Recipe:
        """Return the recipe with the step ``float16`` at its end, unless it has it."""
        there = any(isinstance(step, Float16Options) for step in self.steps)
        return self if there else self.model_copy(update={"steps": (*self.steps, Float16Options())})

    def session_entries(self) -> dict[str, str]:
        """Return the onnxruntime session entries that the recipe means."""
        return {ACCURACY_LEVEL: "0" if self.activations == "float32" else "4"}

    def _settled(self, step: Step) -> Step:
        """Return ``step`` with what it leaves to the recipe."""
        left = isinstance(step, QuantizeWeightsOptions | LowerOptions) and step.activations is None
        return step.model_copy(update={"activations": self.activations}) if left else step

    def to_yaml(self) -> str:
        """Write the recipe as YAML, every option spelled out; :func:`load_recipe` reads it back as the same recipe."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


def presets() -> dict[str, Recipe]:
    """Return the recipes that ship with the package, by name."""
    files = [file for file in resources.files("graphopt.presets").iterdir() if file.name.endswith(".yaml")]
    found = [_parse(file.read_text(encoding="utf-8"), file.name) for file in files]
    return {recipe.name: recipe for recipe in sorted(found, key=lambda recipe: recipe.name)}


def load_recipe(name_or_file: str | Path | Recipe) -> Recipe:
    """Return a preset by its name, or read a YAML file.

    Raises:
        InputError: there is no such preset or file, or the file is not a recipe; names the key that is wrong.
    """
    if isinstance(name_or_file, Recipe):
        return name_or_file
    known = presets()
    if str(name_or_file) in known:
        return known[str(name_or_file)]
    path = Path(name_or_file)
    if not path.is_file():
        raise InputError(
            f"there is no recipe {str(name_or_file)!r}", remedy=f"give a YAML file, or one of {', '.join(known)}"
        )
    return _parse(path.read_text(encoding="utf-8"), str(path))


def _parse(text: str, file: str) -> Recipe:
    try:
        content: Any = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(f"the recipe is not YAML: {error}", file=file) from error
    try:
        return Recipe.model_validate(content)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'recipe'}: {e['msg']}" for e in error.errors())
        raise InputError(
            f"the recipe cannot be used: {problems}",
            file=file,
            remedy="`graphopt recipes NAME` prints one with all keys",
        ) from error
