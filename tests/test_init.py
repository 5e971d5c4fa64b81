from __future__ import annotations

import pkgutil
import subprocess
import sys

import graphopt


def test_every_name_is_there_and_is_no_module() -> None:
    submodules = {info.name for info in pkgutil.iter_modules(graphopt.__path__)}
    for name in graphopt.__all__:
        assert getattr(graphopt, name).__name__ == name
    # Python binds a submodule to its name in the package as soon as anyone imports it.
    assert submodules.isdisjoint(graphopt.__all__)
    assert not hasattr(graphopt, "no_such_name")
    assert set(graphopt.__all__) <= set(dir(graphopt))


def test_presets_may_be_asked_for_twice() -> None:
    assert graphopt.presets() == graphopt.presets()


def test_help_imports_nothing_that_takes_time() -> None:
    code = "import sys, graphopt.cli; print(*sys.modules)"
    loaded_modules = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()
    assert "typer" in loaded_modules
    assert not {"numpy", "onnx_ir", "onnxruntime", "torch", "transformers", "networkx"} & set(loaded_modules)


def test_a_session_imports_nothing_that_only_passes_need() -> None:
    modules = "graphopt.inference.session, graphopt.inference.generation, graphopt.serving.worker"
    code = f"import sys, {modules}; print(*sys.modules)"
    loaded_modules = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()
    assert "onnx_ir" in loaded_modules
    assert not {"networkx", "onnxscript", "torch", "transformers", "graphopt.passes"} & set(loaded_modules)
