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
    FoldNormsOptions,
    Pass,
    QuantizeWeightsOptions,
    RotateOptions,
)
from graphopt.runtime import ACCURACY_LEVEL

Step = Annotated[
    CanonicalizeOptions | FoldNormsOptions | RotateOptions | QuantizeWeightsOptions | EmulateQuantizationOptions,
    Field(discriminator="step"),
]


class Recipe(BaseModel):
    """What to do to a model.

    Attributes:
        name: what reports call it.
        description: one line for a list.
        steps: the passes with their options, in order.
        activations: to what quantized products round their inputs at run time: ``int8`` is onnxruntime's default and
            its fast path, ``float32`` leaves them alone. It is a session entry, not part of the graph: graphopt's own
            session sets it from the manifest, any other session has to.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    description: str = ""
    steps: tuple[Step, ...]
    activations: Literal["int8", "float32"] = "int8"

    def passes(self) -> list[Pass[Any]]:
        """Return the passes of the recipe, ready to run."""
        return [PASSES[step.step](step) for step in self.steps]

    def session_entries(self) -> dict[str, str]:
        """Return the onnxruntime session entries that the recipe means."""
        return {ACCURACY_LEVEL: "0" if self.activations == "float32" else "4"}

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
