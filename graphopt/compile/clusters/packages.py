"""Packages of the extra ``cluster``, imported where they are used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from graphopt.errors import MissingDependencyError

if TYPE_CHECKING:
    from types import ModuleType


def distributed_package() -> ModuleType:
    """Return the package ``distributed``.

    Raises:
        MissingDependencyError: it is not installed.
    """
    return _package("distributed")


def jobqueue_package() -> ModuleType:
    """Return the package ``dask_jobqueue``.

    Raises:
        MissingDependencyError: it is not installed.
    """
    return _package("dask_jobqueue")


def _package(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingDependencyError(
            f"clusters need {name.replace('_', '-')} ({error})", remedy='pip install "graphopt[cluster]"'
        ) from error
