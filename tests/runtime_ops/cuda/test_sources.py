"""Sources of the host in the library for GPUs compile as its ``CMakeLists.txt`` has them: without the interpreter."""

from __future__ import annotations

import subprocess

import pytest

from tests.runtime_ops.cuda import interpreted

COMPILER = interpreted.compiler()


@pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")
def test_sources_of_the_host_need_no_interpreter() -> None:
    """Where nvcc is missing nothing else would compile them, as the interpreter's headers hide what they lack."""
    assert COMPILER is not None
    sources = [source for source in interpreted.sources() if source.suffix == ".cc"]
    assert sources
    command = [COMPILER, "-std=c++17", "-fsyntax-only", f"-I{interpreted.OPERATORS}", *interpreted.WARNINGS]
    said = subprocess.run([*command, *sources], capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
