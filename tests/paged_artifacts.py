"""Small models with caches in pages of 16 tokens, and products of ours."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir

from graphopt.compile.pipeline import optimize
from graphopt.inference.session import Session, load
from graphopt.passes.cache.quantize_kv import QuantizeKV
from graphopt.passes.cache.sparse_kv import SparseKV
from graphopt.passes.recipe import Recipe, load_recipe


def paged_artifact(artifact: Path, folder: Path, recipe: str) -> Path:
    """Return the artifact in pages behind a recipe; what is in ``folder`` already is not made again."""
    if not (folder / "float").exists():
        steps = [{"step": "canonicalize"}, {"step": "page_kv", "page": 16}]
        pages = Recipe.model_validate({"name": "pages", "steps": steps})
        optimize(artifact, pages, folder / "float", quality_tokens=0)
    if not (folder / recipe).exists():
        optimize(folder / "float", load_recipe(recipe).with_lower("ort-cpu:avx512"), folder / recipe, quality_tokens=0)
    return folder / recipe


def with_caches(folder: Path, storage: str, policy: Mapping[str, Any] | None) -> Session:
    """Open a model in pages with another storage and policy, which are changed in its graph."""
    model = ir.load(folder / "model.onnx")
    if storage != "float32":
        QuantizeKV(storage=storage)(model)
    if policy is not None:
        SparseKV.model_validate(policy)(model)
    name = "-".join(str(value) for value in (policy or {}).values())
    file = folder / f"{storage}-{name}.onnx"
    ir.save(model, file)
    return load(file, threads=1)
