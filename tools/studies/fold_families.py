"""Fold every family before and after every preset, with its own names and with shuffled ones: are the layers found?

python tools/studies/fold_families.py --presets all
python tools/studies/fold_families.py --families gemma3,mixtral --presets int4-rtn
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import onnx_ir as ir
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

import graphopt
from graphopt.analysis.structure.folding import Folding, fold
from graphopt.artifact import artifact
from graphopt.errors import GraphoptError
from graphopt.models.checkpoint import quiet
from graphopt.passes.recipe import Recipe, load_recipe, presets
from graphopt.report.trace_builder import trace_of

# Run as a script, Python looks for modules in tools/ only.
sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.decoders import shuffle_names
from tests.families import ENCODERS, FAMILIES, make_model
from tests.graphs import compile_artifact
from tests.presets import distinct, nearest

LAYERS = 6
ALTERNATION = (["sliding_attention"] * 5 + ["full_attention"]) * 2
ENDS = "int4, ends int8"
"""A recipe besides presets: int4, but int8 in the first and in the last layer."""


def family_model(family: str) -> tuple[Any, list[str]]:
    """Return a model with random weights, and the kind of each of its layers."""
    if family == "gemma3":
        settings = FAMILIES["gemma3"][1]
        layer_types = settings["layer_types"]
        settings["layer_types"] = ALTERNATION
        try:
            return make_model("gemma3", len(ALTERNATION)), ALTERNATION
        finally:
            settings["layer_types"] = layer_types
    model = make_model(family, LAYERS)
    types = getattr(model.config, "layer_types", None)
    return model, list(types) if types else ["layer"] * LAYERS


def find_errors(model: ir.Model, kinds: list[str], exceptions: list[int]) -> Iterator[str]:
    """Yield errors of folding; ``kinds`` are the right layers, ``exceptions`` those that are stored differently."""
    plain = fold(model.graph)
    trace = trace_of(model, None, "")
    yield from _layers(plain, kinds)
    exception_layers = sorted(layer for entry in trace.folds for layer in entry.exceptions)
    if exceptions and exception_layers != exceptions:
        yield f"layers {exception_layers} are stored in another way, not {exceptions}"
    outside = [node.role for node in trace.nodes if node.layer is None and node.role.endswith("_proj") and node.weights]
    if outside:
        yield f"outside of layers: {dict(Counter(outside))}"
    copy = model.clone()
    shuffle_names(copy)
    copy_folding = fold(copy.graph)
    if (plain.parts, plain.structures, plain.parameters) != (
        copy_folding.parts,
        copy_folding.structures,
        copy_folding.parameters,
    ):
        yield "other names, other layers"


def _layers(folding: Folding, kinds: list[str]) -> Iterator[str]:
    structures = [tuple(folding.structures[part] for part in layer) for layer in folding.layers()]
    if len(structures) != len(kinds):
        yield f"{len(structures)} layers, not {len(kinds)}"
        return
    first = {kind: structures[kinds.index(kind)] for kind in kinds}
    if [first[kind] for kind in kinds] != structures:
        yield f"layers of one kind differ: {structures}"
    if len(set(first.values())) != len(first):
        yield "layers of different kinds are the same"


def recipes(names: list[str], folder: Path, layers: int) -> Iterator[tuple[str, Recipe, list[int]]]:
    """Yield recipes by name, each with the layers that it stores differently."""
    for name in names:
        yield name, nearest(load_recipe(name)), []
    ends = (0, layers - 1)
    trace = trace_of(artifact.read(folder).model, None, "")
    matrices = {
        trace.weights[number].name: {"format": "int8", "group": 32}
        for node in trace.nodes
        if node.layer in ends and node.role.endswith("_proj")
        for number in node.weights
        if len(trace.weights[number].shape) == 2
    }
    steps: list[Any] = [
        {"step": "canonicalize"},
        {"step": "quantize_weights", "linear": {"format": "int4", "group": 32}, "matrices": matrices},
    ]
    yield ENDS, Recipe(name="ends", steps=tuple(steps)), list(ends) if matrices else []


def main(
    families: Annotated[str, typer.Option(help="which, separated by commas; all by default")] = "",
    names: Annotated[
        str, typer.Option("--presets", help="which, separated by commas, or all; by default one of those alike")
    ] = "",
) -> None:
    """Export, optimize and fold; exits with 1 where a layer was not found."""
    family_names = families.split(",") if families else [*FAMILIES, *ENCODERS]
    preset_names = list(presets()) if names == "all" else names.split(",") if names else list(distinct())
    table = Table("family", "layers", "before", "after", "refused", "wrong", "seconds")
    failures: list[str] = []
    for family in track(family_names, "families"):
        begin, right_count, refusals, faults = time.perf_counter(), 0, 0, list[str]()
        with tempfile.TemporaryDirectory() as temporary, quiet():
            source, float_artifact = Path(temporary) / "source", Path(temporary) / "exported"
            model, kinds = family_model(family)
            model.save_pretrained(source)
            try:
                graphopt.export(source, float_artifact)
            except GraphoptError as error:
                table.add_row(family, "", error.message, "", "", "", "")
                continue
            before = list(find_errors(artifact.read(float_artifact).model, kinds, []))
            name_by_steps: dict[str, str] = {}
            for name, recipe, exceptions in recipes(preset_names, float_artifact, len(kinds)):
                # Presets that differ only in how codes are chosen give the same structure.
                if name_by_steps.setdefault(recipe.model_dump_json(include={"steps"}), name) != name:
                    right_count += 1
                    continue
                try:
                    store = Path(temporary) / f"weights{len(name_by_steps)}"
                    after, _ = compile_artifact(artifact.read(float_artifact), recipe, store)
                except GraphoptError as error:
                    refusals += 1
                    failures.append(f"{family}, {name}: refused: {error.message}")
                    continue
                messages = list(find_errors(after, kinds, exceptions))
                faults += [f"{family}, {name}: {message}" for message in messages]
                right_count += not messages
        failures += [f"{family}, as exported: {message}" for message in before] + faults
        seconds = f"{time.perf_counter() - begin:.0f}"
        row = (
            family,
            str(len(kinds)),
            "no" if before else "yes",
            str(right_count),
            str(refusals),
            str(len(faults)),
            seconds,
        )
        table.add_row(*row)
        print(*row, flush=True)
    Console(width=160).print(table)
    for line in failures:
        print(line[:400])
    raise typer.Exit(any("refused" not in line for line in failures))


if __name__ == "__main__":
    typer.run(main)
