"""Install a wheel into an environment of its own, without a compiler, and check its library and commands.

    python tools/release/check_wheel.py dist/graphopt-0.2.0-py3-none-linux_x86_64.whl
    python tools/release/check_wheel.py --installed          # checks what is installed beside the Python that runs it

pip may install wheels only, and the search path holds the new environment alone: neither pip nor graphopt can compile
anything.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]


def install_and_check(wheel: Path, extras: str) -> None:
    """Install ``wheel`` with ``extras`` into a new environment, and check it there."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        scripts = Path(folder) / ("Scripts" if os.name == "nt" else "bin")
        variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        environment = {**variables, "PATH": str(scripts), "CC": "no-compiler", "CXX": "no-compiler"}
        python = str(scripts / "python")
        install = ["-m", "pip", "install", "--quiet", "--only-binary", ":all:", f"{wheel.resolve()}[{extras}]"]
        for command in (install, [str(Path(__file__).resolve()), "--installed"]):
            subprocess.run([python, *command], check=True, env=environment, cwd=folder)


def check() -> None:
    """Run an operator of the installed library, a pass, and the command; look at the bill of materials.

    Raises:
        AssertionError: something is missing or wrong.
    """
    import graphopt

    location = Path(graphopt.__file__).resolve()
    assert not location.is_relative_to(ROOT / "graphopt"), f"this is the source, and not an installed wheel: {location}"
    import onnxruntime

    from graphopt.runtime_ops import library_path

    library = library_path("cpu")
    assert library is not None, "the wheel holds no library of operators"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.onnx"
        _save_transform(file)
        options = onnxruntime.SessionOptions()
        options.register_custom_ops_library(str(library))
        session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        (y,) = session.run(None, {"x": [[1.0, 1.0, 1.0, 1.0]]})
    # the first column of the orthogonal matrix is all 1/2; the others have as many -1/2 as 1/2
    assert y.tolist() == [[2.0, 0.0, 0.0, 0.0]], y
    command = Path(sys.executable).parent / "graphopt"
    output = subprocess.run([command, "passes"], capture_output=True, text=True, check=True).stdout
    assert "quantize_weights" in output, output
    bills = [file for file in importlib.metadata.files("graphopt") or () if file.parent.name == "sboms"]
    assert len(bills) == 1, f"bills of materials in the wheel: {bills}"
    bill = json.loads(Path(str(bills[0].locate())).read_text())
    assert bill["metadata"]["component"]["version"] == importlib.metadata.version("graphopt")
    print(f"{location.parent}: library, command and bill of materials are there, and an operator runs")


def _save_transform(file: Path) -> None:
    """Write a model that rotates a row of four by ``ai.graphopt::Hadamard``, without the operator's body."""
    from onnx import TensorProto, helper, save

    matrix = [1, 1, 1, 1, 1, -1, 1, -1, 1, 1, -1, -1, 1, -1, -1, 1]
    constants = [
        helper.make_tensor("left", TensorProto.INT8, [1, 1], [1]),
        helper.make_tensor("right", TensorProto.INT8, [4, 4], matrix),
    ]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 4]) for name in "xy")
    node = helper.make_node("Hadamard", ["x", "left", "right"], ["y"], domain="ai.graphopt")
    graph = helper.make_graph([node], "transform", [x], [y], constants)
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("ai.graphopt", 1)]
    save(helper.make_model(graph, opset_imports=opsets, ir_version=11), file)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path, nargs="?")
    parser.add_argument("--extras", default="cpu")
    parser.add_argument("--installed", action="store_true")
    options = parser.parse_args()
    if options.installed == (options.wheel is not None):
        parser.error("name a wheel, or give --installed")
    check() if options.installed else install_and_check(options.wheel, options.extras)
