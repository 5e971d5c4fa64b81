from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest

from tests.graphs import canonical


@pytest.fixture
def llama(llama_artifact: Path) -> ir.Model:
    """The exported Llama, canonicalized, in memory; a new one for each test."""
    return canonical(llama_artifact)
