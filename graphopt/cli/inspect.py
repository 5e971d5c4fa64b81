"""Commands that only read: ``bases``, ``diff``, ``explain``, ``inspect``, ``passes``, ``recipes``."""

from __future__ import annotations

import inspect
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from graphopt.cli.commands import command
from graphopt.cli.console import All, Json, out, print_json, progress, show_error


@command("bases")
def bases(
    model: Annotated[Path, typer.Argument(help="an exported folder, or an .onnx file")],
    as_it_is: Annotated[bool, typer.Option(help="leave out the passes canonicalize and fold_norms")] = False,
    as_json: Json = False,
) -> None:
    """Show what could be rotated: every basis with what writes and reads it, or what keeps it from being rotated."""
    from graphopt.analysis.bases.search import find_bases
    from graphopt.artifact.artifact import read
    from graphopt.passes import PASSES, imports_of
    from graphopt.report.bases import describe, lines

    graph = read(model).model
    steps = [PASSES[name](PASSES[name].options_type()) for name in ("canonicalize", "fold_norms")]
    for step in [] if as_it_is else [*imports_of(graph.graph), *steps]:
        step(graph)
    found = [describe(basis) for basis in find_bases(graph.graph)]
    if as_json:
        return print_json(found)
    for line in lines(found, graph.graph):
        out.print(line, markup=False, highlight=False, soft_wrap=True)
    return None


@command("inspect")
def inspect_model(
    model: Annotated[Path, typer.Argument(help="a folder that holds model.onnx, or an .onnx file, of any maker")],
    query: Annotated[
        list[str] | None, typer.Argument(help="which nodes: op:MatMul role:down_proj format:int4 layer:0-3 pass:rotate")
    ] = None,
    context: Annotated[int, typer.Option(min=0, help="tokens in the cache, for figures per token")] = 1024,
    show_all: All = False,
    as_json: Json = False,
) -> None:
    """Show what a model consists of and what the compiler did to it: by role, layers of one structure as one row."""
    from graphopt.report.query import missed, narrowed, selector
    from graphopt.report.summary import coverage_table, heading, left_table, roles_table
    from graphopt.report.trace_builder import trace

    found = trace(model, context)
    words = " ".join(query or ())
    if as_json:
        return print_json(narrowed(found, words))
    selected = selector(found, words)
    for line in heading(found):
        out.print(line, markup=False, highlight=False, soft_wrap=True)
    nothing = missed(found, words)
    if nothing is not None:
        return out.print(nothing, markup=False, highlight=False, soft_wrap=True)
    for table in (
        roles_table(found, selected),
        coverage_table(found, selected),
        left_table(found, selected, is_folded=not show_all),
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

    found = diff(before, after, numbers=numbers)
    if as_json:
        print_json(found)
    else:
        for line in heading(found):
            out.print(line, markup=False, highlight=False, soft_wrap=True)
        table = groups_table(found, is_folded=not show_all)
        if table is not None:
            out.print(table)
    raise typer.Exit(not found.equal)


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
    from graphopt.report.explanation import SHOWN, told
    from graphopt.report.explanation import explain as explain_node

    found = explain_node(model, node)
    lines = list(told(found, None if show_all else SHOWN))
    if before is not None or time:
        from graphopt.report import measurement as measured

        with progress() as say:
            found.measured = measured.measured(model, found.node.name, before=before, time=time, on_stage=say)
        lines += ["", *measured.told(found.measured)]
    if as_json:
        return print_json(found)
    for line in lines:
        out.print(line, markup=False, highlight=False, soft_wrap=True)
    return None


@command("report")
def write_report(
    model: Annotated[Path, typer.Argument(help="a folder that holds model.onnx, or an .onnx file, of any maker")],
    output: Annotated[Path, typer.Option("-o", "--output", help="the HTML file to write")] = Path("report.html"),
    before: Annotated[Path | None, typer.Option(help="what it was made from: the page shows what is different")] = None,
    where: Annotated[bool, typer.Option("--where", help="also run both, and show where quality was lost")] = False,
    time: Annotated[bool, typer.Option("--time", help="also run it, and show where time goes")] = False,
    weights: Annotated[
        bool,
        typer.Option("--weights", help="with --where: also histograms of weights among the levels of formats"),
    ] = False,
    context: Annotated[int, typer.Option(min=0, help="tokens in the cache, for figures per token")] = 1024,
) -> None:
    """Write one HTML file about a model, which needs no network: size, passes, layers, differences, every node."""
    from graphopt.report.page.write import write

    with progress() as say:
        write(model, output, before=before, where=where, time=time, weights=weights, context=context, on_stage=say)
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
    from graphopt.report.page.write import page_about

    if netron:
        from graphopt.report.netron import open_netron

        return open_netron(model, port, browser=browser)
    if model_explorer is not None:
        from graphopt.report import model_explorer as explorer
        from graphopt.report.difference import diff
        from graphopt.report.trace_builder import trace

        both = None if before is None else (trace(before, context), diff(before, model))
        for file in explorer.export(trace(model, context), model_explorer, *(both or ())):
            out.print(f"written: {file}", markup=False, highlight=False, soft_wrap=True)
        return None
    with progress() as say:
        make = partial(page_about, model, before=before, context=context, live=True)
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

    found = [{"name": p.name, "effect": p.effect, "doc": inspect.getdoc(p) or ""} for p in PASSES.values()]
    if as_json:
        return print_json(found)
    for entry in found:
        out.print(f"[bold]{entry['name']}[/bold] ({entry['effect']})")
        out.print(entry["doc"] + "\n", markup=False, highlight=False, soft_wrap=True)
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
    found = presets()
    if as_json:
        return print_json([recipe.model_dump(mode="json") for recipe in found.values()])
    table = ConsoleTable(["recipe", "steps", "what it does"])
    for recipe in found.values():
        table.add_row(recipe.name, ", ".join(step.step for step in recipe.steps), recipe.description)
    out.print(table)
    return None
