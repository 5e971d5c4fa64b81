"""A model as files for as long as onnxruntime needs them, in a folder of its own that is removed with it.

Weights that lie in files already stay there: a snapshot behind a pass is the graph, and what is new.
"""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from graphopt.graph.weights.data_file import save_model
from graphopt.graph.weights.evaluator import Evaluator
from graphopt.graph.weights.store import Store

if TYPE_CHECKING:
    from collections.abc import Iterator

    import onnx_ir as ir


class Snapshots:
    """Writes models as they are between passes.

    Args:
        folder: where; it holds nothing but evaluated weights when no snapshot is in use.
        evaluator: what evaluates weights; by default this process, into the folder.
    """

    def __init__(self, folder: Path, evaluator: Evaluator | None = None) -> None:
        self._folder = folder
        self._evaluator = evaluator or Evaluator(Store(folder / "weights"))

    def settle(self, model: ir.Model) -> None:
        """Evaluate the weights of a model that are not yet, each once; copies of the model made later share them."""
        self._evaluator.settle(model)

    @contextlib.contextmanager
    def write(self, model: ir.Model) -> Iterator[Path]:
        """Write a model, which names where its weights lie, and give the ``.onnx`` file, until the block ends.

        :func:`graphopt.ort.session.open_session` opens it with ``in_place``. Nothing in memory refers to the files: the
        weights of ``model`` stay where they were.

        Raises:
            InputError: the disk is too small.
        """
        self.settle(model)
        with tempfile.TemporaryDirectory(prefix="snapshot-", dir=self._folder) as folder:
            path = Path(folder) / "model.onnx"
            save_model(model, path, "model.data", executor=self._evaluator.executor, in_place=True)
            yield path
