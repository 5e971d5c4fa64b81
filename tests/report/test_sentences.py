"""Every fact has its words: codes and templates belong together, and what runs of presets say can be read."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from pydantic import BaseModel

import graphopt
from graphopt.artifact.manifest import Manifest
from graphopt.compile.pipeline import optimize
from graphopt.graph.diagnostics import RULES, Fact, Rule
from graphopt.passes.recipe import load_recipe
from graphopt.report.sentences import sentence

PRESETS = {
    "rotate-online": [],
    "rotate-w4a8-rtn": ["float16"],
    "rotate-kv4-rtn": ["last_logits"],
    "streaming": ["lower"],
    "int4-rtn": [],
}
"""Steps to add to each; together they say most of what a small model can make passes say."""


def modules() -> Iterator[ModuleType]:
    for info in pkgutil.walk_packages(graphopt.__path__, "graphopt."):
        spec = importlib.util.find_spec(info.name)
        # The library of operators lies in the package too, and is no module of Python.
        if spec is not None and str(spec.origin).endswith(".py") and not info.name.endswith("__main__"):
            yield importlib.import_module(info.name)


@pytest.fixture(scope="module")
def sources() -> list[tuple[ModuleType, ast.Module]]:
    return [(m, ast.parse(Path(m.__file__).read_text("utf-8"))) for m in modules() if m.__file__]


def test_the_view_knows_every_rule(sources: list[tuple[ModuleType, ast.Module]]) -> None:
    # In a process of its own: a manifest is shown where no pass was run and nothing else imported.
    code = "import graphopt.report.sentences; from graphopt.graph.diagnostics import RULES; print(*RULES)"
    codes = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    rules = {id(value): value for module, _ in sources for value in vars(module).values() if isinstance(value, Rule)}
    assert len(rules) > 200
    assert sorted(rule.code for rule in rules.values()) == sorted(codes)


def test_no_rule_is_idle(sources: list[tuple[ModuleType, ast.Module]]) -> None:
    used: set[int] = set()
    for module, tree in sources:
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                used.add(id(getattr(module, node.id, None)))
    assert [code for code, rule in RULES.items() if id(rule) not in used and not code.startswith("tests.")] == []


def test_every_statement_gives_the_figures_of_its_rule(sources: list[tuple[ModuleType, ast.Module]]) -> None:
    statements = 0
    for module, tree in sources:
        for node in ast.walk(tree):
            rule = getattr(module, node.func.id, None) if isinstance(getattr(node, "func", None), ast.Name) else None
            if isinstance(rule, Rule):
                figures = {keyword.arg for keyword in node.keywords}
                if None in figures:  # figures that are collected before: the rule itself refuses others
                    figures = figures - {None} | rule.required_figures
                location = f"{module.__name__}:{node.lineno}: {rule.code}"
                assert not node.args, location
                assert rule.required_figures <= figures <= rule.required_figures | rule.optional_figures, location
                statements += 1
    assert statements > 200


def facts_in(value: object) -> Iterator[Fact]:
    """Yield every fact in a report, those inside of others too."""
    if isinstance(value, Fact):
        yield value
    if isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from facts_in(getattr(value, name))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from facts_in(item)
    elif isinstance(value, dict):
        yield from facts_in(list(value.values()))


@pytest.mark.parametrize("preset", PRESETS)
def test_what_a_preset_says_can_be_read_from_the_file_too(preset: str, llama_artifact: Path) -> None:
    manifest = optimize(llama_artifact, load_recipe(preset, PRESETS[preset]), run=False).manifest
    facts = list(facts_in(manifest))
    codes = {fact.code for fact in facts}
    assert len(codes) > 8
    facts_of_file = list(facts_in(Manifest.model_validate_json(manifest.model_dump_json())))
    assert facts_of_file == facts
    for fact in facts_of_file:
        assert fact.code in RULES, fact.code
        words = sentence(fact)
        assert words, fact
        assert "{" not in words, words
        # What a figure lacks is shown as a question mark, and a name of Python is no word.
        assert not {"?", "None", "True", "False"} & set(words.replace(",", " ").split()), words
    assert all(removal.by or removal.where for report in manifest.passes for removal in report.removed)
