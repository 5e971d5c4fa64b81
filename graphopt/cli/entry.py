"""The ``graphopt`` command.

Results go to standard output, progress and errors to standard error; see :data:`EXIT_CODES`.
"""

from __future__ import annotations

import gc
import inspect

import typer

from graphopt.cli.commands import COMMANDS
from graphopt.cli.console import show_error
from graphopt.errors import GraphoptError
from graphopt.util.memory import keep_freed_memory

EXIT_CODES = {
    0: "done",
    1: "a bug in graphopt; of `diff`: the models differ",
    2: "the input cannot be used",
    3: "a check failed and nothing was written",
    4: "an optional package is missing",
}
"""What the exit code of every command means."""

_NEW_OBJECTS = 100_000
"""New objects until Python's collector looks for cycles. Graphs are tens of thousands of small objects that stay, and
the default of 700 looks at them far too often."""


def build_app() -> typer.Typer:
    """Return the application with all commands of :mod:`graphopt.cli`."""
    application = typer.Typer(
        name="graphopt",
        help="Make a language model small and fast in onnxruntime.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    groups: dict[str, typer.Typer] = {"": application}
    for name, function in COMMANDS.items():
        group, _, verb = name.rpartition(" ")
        if group not in groups:
            groups[group] = typer.Typer(no_args_is_help=True)
            application.add_typer(groups[group], name=group, help=inspect.getdoc(inspect.getmodule(function)))
        groups[group].command(verb)(function)
    return application


app = build_app()


def main() -> None:
    """Run the command; an error that graphopt raises on purpose becomes a line on standard error and an exit code."""
    gc.set_threshold(_NEW_OBJECTS, 20, 50)
    keep_freed_memory()
    try:
        app()
    except GraphoptError as error:
        show_error(error)
        raise SystemExit(error.exit_code) from error
    except KeyboardInterrupt as interrupt:
        raise SystemExit(130) from interrupt
