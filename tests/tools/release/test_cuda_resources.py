"""The figures of CUDA kernels are read right; with ``make test-native`` all kernels are compiled, and none spills."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tools.release import cuda_resources

PTXAS_OUTPUT = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN8graphopt3oneE' for 'sm_80'
ptxas info    : Function properties for _ZN8graphopt3oneE
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 96 registers, used 1 barriers, 832 bytes cmem[0]
ptxas info    : Compile time = 61.318 ms
ptxas info    : Compiling entry function '_ZN8graphopt3twoE' for 'sm_90a'
ptxas info    : Function properties for _ZN8graphopt3twoE
    40 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 1024 bytes smem
"""

SPILLS = """
#include <cuda_runtime.h>
__global__ void __launch_bounds__(1024, 1) spills(float* x) {
  float v[256];
#pragma unroll
  for (int i = 0; i < 256; ++i) v[i] = x[threadIdx.x + 1024 * i];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 256; ++i) x[threadIdx.x * 256 + i] = v[i] * v[255 - i];
}
"""

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc")


def test_figures_of_each_kernel_are_read() -> None:
    first, second = cuda_resources.resources_of(PTXAS_OUTPUT)
    assert (first.architecture, first.registers, first.spill_bytes, first.stack, first.shared_bytes) == (
        "sm_80",
        96,
        0,
        0,
        0,
    )
    assert (second.architecture, second.registers, second.spill_bytes, second.stack, second.shared_bytes) == (
        "sm_90a",
        255,
        40,
        40,
        1024,
    )


def test_without_nvcc_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", "")
    assert cuda_resources.main([]) == 2
    assert "no nvcc" in capsys.readouterr().err


@needs_nvcc
def test_a_kernel_that_spills_or_is_warned_of_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "spills.cu"
    file.write_text(SPILLS)
    assert cuda_resources.main([str(file)]) == 1
    assert "2 kernels spill registers" in capsys.readouterr().err
    file.write_text("__global__ void warned() { int unused; }\n")
    with pytest.raises(SystemExit, match="nvcc refuses it"):
        cuda_resources.main([str(file)])


@needs_nvcc
@pytest.mark.skipif("GRAPHOPT_SANITIZE" not in os.environ, reason="it takes a minute: `make test-native` does it")
def test_no_kernel_spills_and_nvcc_warns_of_none(capsys: pytest.CaptureFixture[str]) -> None:
    primitives = Path(__file__).parents[2] / "runtime_ops" / "cuda" / "primitives.cu"
    assert cuda_resources.main([]) == 0
    output = capsys.readouterr().out
    assert "hadamard<0>" in output
    assert cuda_resources.main([str(primitives)]) == 0
