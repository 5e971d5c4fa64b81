"""The checker shares nothing with the rewriter but the graph and the claims."""

from __future__ import annotations

import ast
from pathlib import Path

import graphopt

FILES = sorted((Path(graphopt.__file__).parent / "verification" / "certificate").glob("*.py"))
# Data that the checker confirms, compares with, or says: matrices, signs, claims, the operator's own body, facts. And
# how many threads may run.
DATA = {
    "graphopt.errors",
    "graphopt.graph.diagnostics",
    "graphopt.util.processors",
    "graphopt.numerics.rotations.claims",
    "graphopt.numerics.rotations.hadamard",
    "graphopt.numerics.rotations.orthogonal",
    "graphopt.runtime_ops",
}


def test_no_code_of_the_passes_or_the_analysis_is_imported() -> None:
    assert len(FILES) > 10
    modules = set()
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("graphopt"):
                modules.add(node.module)
            if isinstance(node, ast.Import):
                modules |= {name.name for name in node.names if name.name.startswith("graphopt")}
    assert {name for name in modules if not name.startswith("graphopt.verification.certificate")} <= DATA


def test_no_rotation_is_applied_by_the_rewriter_s_code() -> None:
    names = set()
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "graphopt.numerics.rotations.orthogonal":
                names |= {name.name for name in node.names}
    assert names == {"RandomRotation", "signs"}
