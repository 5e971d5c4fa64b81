"""Commands that only read: ``bases``, ``diff``, ``explain``, ``families``, ``inspect``, ``passes``, ``recipes``."""

from __future__ import annotations

import inspect
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from graphopt.cli.commands import command
from graphopt.cli.console import Json, ShowAll, out, print_json, progress, show_error


@command("bases")
def bases(
    model: Annotated[Path, typer.Argument(help="an exported folder, or an .onnx file")],
    as_it_is: Annotated[bool, typer.Option(help="leave out the passes canonicalize and fold_norms")] = False,
    as_json: Json = False,
) -> None:
    """Show what could be rotated: every basis with what writes and reads it, or what keeps it from being rotated."""
    from graphopt.analysis.bases.search import find_bases
    from graphopt.artifact.artifact import read
    from graphopt.passes import PASSES
    from graphopt.passes.recipe import imports_of
    from graphopt.report.bases import describe, lines

    graph = read(model).model
    steps = [PASSES[name]() for name in ("canonicalize", "fold_norms")]
    for step in [] if as_it_is else [*imports_of(graph.graph), *steps]:
        step(graph)
    reports = [describe(basis) for basis in find_bases(graph.graph)]
    if as_json:
        return print_json(reports)
    for line in lines(reports, graph.graph):
        out.print(line, markup=False, highlight=False, soft_wrap=True)
    return None


@command("inspect")
def inspect_model(
    model: Annotated[Path, typer.Argument(help="a folder that holds model.onnx, or an .onnx file, of any maker")],
    query: Annotated[
        list[str] | None, typer.Argument(help="which nodes: op:MatMul role:down_proj format:int4 layer:0-3 pass:rotate")
    ] = None,
    context: Annotated[int, typer.Option(min=0, help="tokens in the cache, for figures per token")] = 1024,
    show_all: ShowAll = False,
    as_json: Json = False,
) -> None:
    """Show what a model consists of and what the compiler did to it: by role, layers of one structure as one row."""
    from graphopt.report.query import mismatch, select_nodes, selector
    from graphopt.report.summary import coverage_table, heading, left_table, roles_table
    from graphopt.report.trace_builder import trace

    model_trace = trace(model, context)
    words = " ".join(query or ())
    if as_json:
        return print_json(select_nodes(model_trace, words))
    is_selected = selector(model_trace, words)
    for line in heading(model_trace):
        out.print(line, markup=False, highlight=False, soft_wrap=True)
    missing = mismatch(model_trace, words)
    if missing is not None:
        return out.print(missing, markup=False, highlight=False, soft_wrap=True)
    for table in (
        roles_table(model_trace, is_selected),
        coverage_table(model_trace, is_selected),
        left_table(model_trace, is_selected, is_folded=not show_all),
    ):
        if table is not None:
            out.print(table)
    return None


@command("diff")
def diff_models(
    before: Annotated[Path, typer.Argument(help="a folder that holds model.onnx, or an .onnx file, of any maker")],
    after: Annotated[Path, typer.Argument(help="another")],
    numbers: Annotated[bool, typer.Option(help="compare all numbers of weights; else a sample of their bytes")] = True,
    show_all: Annotated[bool, typer.Option("--all", help="list each change of an edit; else the first few")] = False,
    as_json: Json = False,
) -> None:
    """Show how AFTER differs from BEFORE, equal edits of many layers as one row; exits with 1 where it does."""
    from graphopt.report.difference import diff, groups_table, heading

    difference = diff(before, after, numbers=numbers)
    if as_json:
        print_json(difference)
    else:
        for line in heading(difference):
            out.print(line, markup=False, highlight=False, soft_wrap=True)
        table = groups_table(difference, is_folded=not show_all)
        if table is not None:
            out.print(table)
    raise typer.Exit(not difference.equal)


@command("explain")
def explain(
    model: Annotated[Path, typer.Argument(help="a folder that holds model.onnx, or an .onnx file, of any maker")],
    node: Annotated[str, typer.Argument(help="a node; a weight stands for what reads it, a value for what makes it")],
    before: Annotated[Path | None, typer.Option(help="what MODEL was made from: also measure the node's error")] = None,
    time: Annotated[bool, typer.Option("--time", help="also measure the node's time")] = False,
    show_all: Annotated[bool, typer.Option("--all", help="list all names; else the first few of many")] = False,
    as_json: Json = False,
) -> None:
    """Show where a node came from: the passes that made it of which nodes, what each did, and what was checked."""
    from graphopt.report.explanation import LIST_LENGTH, summary_lines
    from graphopt.report.explanation import explain as explain_node

    explanation = explain_node(model, node)
    lines = list(summary_lines(explanation, None if show_all else LIST_LENGTH))
    if before is not None or time:
        from graphopt.report import measurement as measured

        with progress() as say:
            explanation.measured = measured.measure_node(
                model, explanation.node.name, before=before, time=time, on_stage=say
            )
        lines += ["", *measured.summary_lines(explanation.measured)]
    if as_json:
        return print_json(explanation)
    for line in lines:
        out.print(line, markup=False, highlight=False, soft_wrap=True)
    return None


@command("report")
def write_report(
    model: Annotated[Path, typer.Argument(help="a folder that holds model.onnx, or an .onnx file, of any maker")],
    output: Annotated[Path, typer.Option("-o", "--output", help="the HTML file to write")] = Path("report.html"),
    before: Annotated[Path | None, typer.Option(help="what it was made from: the page shows what is different")] = None,
    locate_losses: Annotated[
        bool, typer.Option("--where", help="also run both, and show where quality was lost")
    ] = False,
    time: Annotated[bool, typer.Option("--time", help="also run it, and show where time goes")] = False,
    weights: Annotated[
        bool,
        typer.Option("--weights", help="with --where: also histograms of weights among the levels of formats"),
    ] = False,
    context: Annotated[int, typer.Option(min=0, help="tokens in the cache, for figures per token")] = 1024,
) -> None:
    """Write one HTML file about a model, which needs no network: size, passes, layers, differences, every node."""
    from graphopt.report.page.write import PageOptions, write

    options = PageOptions(locate_losses=locate_losses, time=time, weights=weights, context=context)
    with progress() as say:
        write(model, output, before, options, on_stage=say)
    out.print(f"written: {output}", markup=False, highlight=False, soft_wrap=True)


@command("view")
def view_model(
    model: Annotated[Path, typer.Argument(help="a folder that holds model.onnx, or an .onnx file, of any maker")],
    before: Annotated[Path | None, typer.Option(help="what it was made from: the page shows what is different")] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one")] = 0,
    browser: Annotated[bool, typer.Option(help="open the page in a browser")] = True,
    netron: Annotated[
        bool, typer.Option("--netron", help="open the graph in Netron instead, if it is installed")
    ] = False,
    model_explorer: Annotated[
        Path | None, typer.Option(help="instead, a folder to write the graph into as Model Explorer reads it, and end")
    ] = None,
    context: Annotated[int, typer.Option(min=0, help="tokens in the cache, for figures per token")] = 1024,
) -> None:
    """Show the page of `report` in a browser, and show it anew when the model's files change; Ctrl-C ends it."""
    import webbrowser

    from graphopt.report.page.serve import PageServer
    from graphopt.report.page.write import PageOptions, page_about

    if netron:
        from graphopt.report.viewers import open_netron

        return open_netron(model, port, browser=browser)
    if model_explorer is not None:
        from graphopt.report import viewers
        from graphopt.report.difference import diff
        from graphopt.report.trace_builder import trace

        comparison = None if before is None else (trace(before, context), diff(before, model))
        for file in viewers.export(trace(model, context), model_explorer, *(comparison or ())):
            out.print(f"written: {file}", markup=False, highlight=False, soft_wrap=True)
        return None
    with progress() as say:
        make = partial(page_about, model, before, PageOptions(context=context), live=True)
        server = PageServer(model, partial(make, on_stage=say), port, on_failure=show_error)
    with server:
        out.print(f"serving {server.address}", markup=False, highlight=False, soft_wrap=True)
        if browser:
            webbrowser.open(server.address)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            out.print("ended")
    return None


@command("passes")
def passes(as_json: Json = False) -> None:
    """List the passes: what each does to a graph, and whether it is exact."""
    from graphopt.passes import PASSES

    entries = [{"name": p.name, "effect": p.effect, "doc": inspect.getdoc(p) or ""} for p in PASSES.values()]
    if as_json:
        return print_json(entries)
    for entry in entries:
        out.print(f"[bold]{entry['name']}[/bold] ({entry['effect']})")
        out.print(entry["doc"] + "\n", markup=False, highlight=False, soft_wrap=True)
    return None


@command("families")
def families(as_json: Json = False) -> None:
    """List the families of models that are known to enter, by what mixes tokens in their layers; others may too."""
    from dataclasses import asdict

    from graphopt.models.families import FAMILY_GROUPS
    from graphopt.report.console_table import ConsoleTable

    if as_json:
        return print_json([asdict(group) for group in FAMILY_GROUPS])
    table = ConsoleTable(["layers", "states", "families"])
    for group in FAMILY_GROUPS:
        table.add_row(group.kind, ", ".join(group.states), ", ".join(group.families))
    out.print(table)
    return None


@command("recipes")
def recipes(
    name: Annotated[str | None, typer.Argument(help="print this one as YAML, every option spelled out")] = None,
    as_json: Json = False,
) -> None:
    """List the recipes that ship with graphopt, or print one to start your own from."""
    from graphopt.passes.recipe import load_recipe, presets
    from graphopt.report.console_table import ConsoleTable

    if name is not None:
        recipe = load_recipe(name)
        return print_json(recipe) if as_json else print(recipe.to_yaml(), end="")
    shipped_recipes = presets()
    if as_json:
        return print_json([recipe.model_dump(mode="json") for recipe in shipped_recipes.values()])
    table = ConsoleTable(["recipe", "steps", "what it does"])
    for recipe in shipped_recipes.values():
        table.add_row(recipe.name, ", ".join(step.name for step in recipe.steps), recipe.description)
    out.print(table)
    return None
