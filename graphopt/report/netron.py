"""Netron, a viewer of single graphs: it draws every node, folds nothing, and is an optional package."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphopt.errors import InputError, MissingDependencyError

if TYPE_CHECKING:
    from pathlib import Path


def open_netron(model: Path, port: int = 0, *, browser: bool = True) -> None:
    """Serve the graph of ``model`` with Netron until Ctrl-C.

    Args:
        model: an artifact, or an .onnx file.
        port: 0 lets Netron choose.
        browser: whether to open it in a browser.

    Raises:
        InputError: there is no model.
        MissingDependencyError: Netron is not installed.
    """
    file = model / "model.onnx" if model.is_dir() else model
    if not file.is_file():
        raise InputError("there is no ONNX model here", file=model, remedy="give an artifact, or an .onnx file")
    try:
        import netron
    except ImportError as error:
        raise MissingDependencyError("Netron is not installed", remedy="pip install netron") from error
    netron.start(str(file), address=("127.0.0.1", port) if port else None, browse=browser)
    netron.wait()
