"""What the pages say holds: links resolve, generated pages are current, commands and recipes in them exist."""

from __future__ import annotations

import functools
import itertools
import json
import re
import shlex
from pathlib import Path

import mkdocs.commands.build
import mkdocs.config
import pytest
import yaml
from typer.testing import CliRunner

from graphopt.cli import app
from graphopt.passes.recipe import Recipe, load_recipe
from tools.release.reference import PAGES

ROOT = Path(__file__).parents[1]
FILES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [str(file.relative_to(ROOT)) for file in FILES]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@functools.cache
def generate_page(name: str) -> str:
    """Return what a generated page is now."""
    return PAGES[name]()


def blocks(kind: str) -> list[str]:
    """Return the fenced blocks of all pages that are of the kind."""
    return [block for file in FILES for info, block in FENCE.findall(file.read_text("utf-8")) if info == kind]


def anchors(page: Path) -> set[str]:
    """Return the names that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text("utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_relative_links_resolve(file: Path) -> None:
    text = FENCE.sub("", file.read_text("utf-8"))
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("https://", "http://")):
            continue
        path, _, anchor = link.partition("#")
        target = (file.parent / path).resolve() if path else file
        assert target.exists(), f"{file.name}: {link} leads nowhere"
        assert not anchor or anchor in anchors(target), f"{file.name}: {link} names no heading of {target.name}"


def test_readme_is_short_and_names_every_page() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    assert len(readme.splitlines()) <= 120
    missing_pages = [file.name for file in (ROOT / "docs").glob("*.md") if f"(docs/{file.name})" not in readme]
    assert not missing_pages


@pytest.mark.parametrize("name", PAGES)
def test_generated_pages_are_current(name: str) -> None:
    page = (ROOT / "docs" / name).read_text("utf-8")
    assert page == generate_page(name), f"docs/{name} is out of date: run python tools/release/reference.py"


def test_command_reference_names_the_options_that_the_command_line_takes() -> None:
    sections = re.split(r"^## ", generate_page("commands.md"), flags=re.MULTILINE)[1:]
    for section in sections:
        command, _, body = section.partition("\n")
        # Wide enough that no option's name is cut.
        help_text = (
            CliRunner().invoke(app, [*command.split(), "--help"], env={"COLUMNS": "300", "NO_COLOR": "1"}).output
        )
        documented_options = set(
            re.findall(r"(?<![\w-])--[a-z][\w-]*", "\n".join(re.findall(r"^\| (`.*?`) \|", body, re.MULTILINE)))
        )
        assert documented_options == set(re.findall(r"(?<![\w-])--[a-z][\w-]*(?= )", _options(help_text))) - {
            "--help"
        }, command


def _options(help_text: str) -> str:
    """Return what stands in front of the explanations in the lines that explain options."""
    lines = [re.split(r" {3,}", line.strip(" │*"))[:2] for line in help_text.splitlines() if re.match(r"[│ *]+-", line)]
    return "\n".join(" ".join(line) + " " for line in lines)


@pytest.mark.parametrize("line", [line for block in blocks("sh") for line in block.splitlines() if "graphopt " in line])
def test_commands_in_pages_exist(line: str) -> None:
    words = shlex.split(line.rstrip("\\"), comments=True)
    if words[0] != "graphopt" or len(words) < 2 or not words[1].islower():
        return
    pages = generate_page("commands.md")
    if f"## {words[1]} " in pages:  # a group of commands
        words[1:3] = [" ".join(words[1:3])]
    section = re.search(rf"^## {words[1]}\n(.*?)(?=^## |\Z)", pages, re.MULTILINE | re.DOTALL)
    assert section is not None, f"there is no command {words[1]}"
    for word in words[2:]:
        if word.startswith("-") and word != "[OPTIONS]":
            assert re.search(rf"[`, ]{word}[`,]", section[1]), f"graphopt {words[1]} takes no {word}"
    if words[1] == "optimize" and "OPTIONS" not in line:
        options = dict(itertools.pairwise(words))
        if not options.get("-r", "").endswith(".yaml"):
            additions = [value for option, value in itertools.pairwise(words) if option == "--add"]
            settings = [value for option, value in itertools.pairwise(words) if option == "--set"]
            load_recipe(options.get("-r", "int4"), additions, settings)


@pytest.mark.parametrize("block", [block for block in blocks("yaml") if "step:" in block])
def test_recipes_in_pages_are_recipes(block: str) -> None:
    content = yaml.safe_load(block)
    recipe = content if isinstance(content, dict) else {"name": "page", "steps": content}
    for step in recipe["steps"]:
        step.pop("heads", None)  # a file, which the page does not bring
    Recipe.model_validate(recipe)


def test_names_of_headings_are_those_of_github(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Rotations, and their proof\n\n## fold_norms\n\n```sh\n# a comment\n```\n", "utf-8")
    assert anchors(page) == {"rotations-and-their-proof", "fold_norms"}


def test_the_site_is_built_without_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link or an anchor that leads nowhere, or a page that no menu names, is a warning, and strict refuses it."""
    monkeypatch.chdir(ROOT)
    config = mkdocs.config.load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path / "site"), strict=True)
    config.plugins.on_startup(command="build", dirty=False)
    mkdocs.commands.build.build(config)
    site = tmp_path / "site"
    assert "make demo" in (site / "index.html").read_text("utf-8")
    words = {
        entry["location"] for entry in json.loads((site / "search" / "search_index.json").read_text("utf-8"))["docs"]
    }
    assert "passes/algebra/#rotate" in words


def test_paths_in_contributing_exist() -> None:
    paths = re.findall(r"`((?:graphopt|tests|tools|docs)/[\w/.]+)`", (ROOT / "CONTRIBUTING.md").read_text("utf-8"))
    assert len(paths) > 30
    assert [
        path for path in paths if not re.search(r"NAME|PHASE|your_|folder", path) and not (ROOT / path).exists()
    ] == []
