"""What ``run`` does with a graph that reads no text: outputs for inputs that were given, or for random ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graphopt.cli.console import out, print_json
from graphopt.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from graphopt.inference.session import OpenModel
    from graphopt.tasks.graph.samples import Samples

_SHOWN_NUMBERS, _SHOWN_SAMPLES = 6, 16


def print_outputs(model: OpenModel, samples: Samples, save: Path | None, as_json: bool) -> None:
    """Print shape, range and first numbers of each output; with ``as_json`` all numbers.

    Args:
        model: the graph.
        samples: what it is fed; of random inputs one draw.
        save: an ``.npz`` file for the outputs, those of several samples stacked; ``None`` for none.
        as_json: whether to print JSON.

    Raises:
        InputError: the graph cannot be fed, or the file cannot be written.
    """
    from graphopt.inference.graphs import run_graph
    from graphopt.report.console_table import ConsoleTable, figure_columns

    feeds, runs = run_graph(model, samples)
    if save is not None:
        _save(save, runs)
    if as_json:
        return print_json([{name: _plain(result) for name, result in item.items()} for item in runs])
    out.print(str(samples.description(feeds)), markup=False, highlight=False, soft_wrap=True)
    table = ConsoleTable(
        ["sample", "output", "type", "shape", *figure_columns("smallest", "largest", "mean"), "begins"]
    )
    for number, item in enumerate(runs[:_SHOWN_SAMPLES], start=1):
        for name, result in item.items():
            table.add_row(str(number), name, *_cells(result))
    out.print(table)
    if len(runs) > _SHOWN_SAMPLES:
        out.print(f"{len(runs) - _SHOWN_SAMPLES} further samples: --save FILE.npz writes them, --json prints them")
    if save is not None:
        out.print(f"written: {save}", markup=False, highlight=False, soft_wrap=True)
    return None


def _cells(result: Any) -> list[str]:
    import numpy as np

    if not isinstance(result, np.ndarray):
        return [type(result).__name__, str(len(result)), "", "", "", ""]
    shape = f"[{', '.join(map(str, result.shape))}]"
    if result.dtype.kind not in "fiubV" or not result.size:
        return [str(result.dtype), shape, "", "", "", ", ".join(map(str, result.ravel()[:_SHOWN_NUMBERS]))]
    numbers = result.astype(np.float64)
    figures = [f"{figure:.4g}" for figure in (numbers.min(), numbers.max(), numbers.mean())]
    beginning = ", ".join(f"{number:.4g}" for number in numbers.ravel()[:_SHOWN_NUMBERS])
    return [str(result.dtype), shape, *figures, beginning]


def _plain(result: Any) -> Any:
    import numpy as np

    if isinstance(result, np.ndarray):
        return (result.astype(np.float64) if result.dtype.kind == "V" else result).tolist()
    return [_plain(part) for part in result] if isinstance(result, list) else result


def _save(file: Path, runs: Sequence[Mapping[str, Any]]) -> None:
    """Write arrays by the names of outputs; what is no array is refused.

    Raises:
        InputError: an output is no array, samples have different shapes, or the file cannot be written.
    """
    import numpy as np

    arrays: dict[str, Any] = {}
    for name in runs[0]:
        parts = [item[name] for item in runs]
        if not all(isinstance(part, np.ndarray) for part in parts):
            raise InputError("an output is no array, and cannot be saved", tensor=name, remedy="print it: --json")
        if len({part.shape for part in parts}) > 1:
            raise InputError(
                "samples have outputs of different shapes", tensor=name, remedy="save them one by one, or print: --json"
            )
        arrays[name] = parts[0] if len(parts) == 1 else np.stack(parts)
    try:
        with file.open("wb") as stream:
            np.savez(stream, **arrays)
    except OSError as error:
        raise InputError(f"the outputs cannot be written: {error}", file=file) from error
