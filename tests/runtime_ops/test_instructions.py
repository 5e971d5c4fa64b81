from __future__ import annotations

from pathlib import Path

import pytest

from graphopt.errors import InputError
from graphopt.runtime_ops import instructions
from graphopt.runtime_ops.instructions import ISA_VARIABLE, instructions_here
from graphopt.runtime_ops.library import PATH_VARIABLE
from tests.native import INSTRUCTIONS, here, needs_library, skip_without

AVX2 = "fpu sse4_2 avx avx2 fma f16c"
AVX512 = f"{AVX2} avx512f avx512dq avx512bw avx512vl avx512_vnni avx512vbmi avx512_bf16"
NEON = "fp asimd evtstrm aes crc32"


@pytest.fixture
def without_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PATH_VARIABLE, "")
    monkeypatch.delenv(ISA_VARIABLE, raising=False)


@needs_library
@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_kernels_use_the_set_that_the_environment_names(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without(name)  # the library refuses a set that the machine lacks, which no environment can name then
    monkeypatch.setenv(ISA_VARIABLE, name)
    assert instructions_here() == name


@needs_library
def test_by_default_it_is_the_fastest_that_kernels_run_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ISA_VARIABLE, raising=False)
    assert instructions_here() == here()[-1]


@pytest.mark.parametrize("path", [None, ""], ids=["library", "no library"])
def test_a_set_that_is_unknown_is_refused(path: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if path is not None:
        monkeypatch.setenv(PATH_VARIABLE, path)
    monkeypatch.setenv(ISA_VARIABLE, "sse9")
    # a default instead would hide a misspelt name
    with pytest.raises(InputError, match="GRAPHOPT_OPS_ISA is 'sse9', which this machine does not have.*avx2"):
        instructions_here()


@pytest.mark.usefixtures("without_library")
@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (AVX512, "avx512"),
        (AVX512.replace(" avx512_bf16", ""), "avx2"),
        (f"{AVX2} avx_vnni", "avxvnni"),
        (AVX2, "avx2"),
        (AVX2.replace(" f16c", ""), "scalar"),
    ],
)
def test_without_the_library_flags_of_the_processor_tell(
    flags: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nvendor_id\t: any\nflags\t\t: {flags}\nbugs\t\t: none\n")
    monkeypatch.setattr(instructions, "_CPUINFO", tmp_path / "cpuinfo")
    assert instructions_here() == expected
    monkeypatch.setenv(ISA_VARIABLE, "avxvnni")
    assert instructions_here() == "avxvnni"


@pytest.mark.usefixtures("without_library")
@pytest.mark.parametrize(
    ("features", "expected"),
    [
        (f"{NEON} asimddp i8mm bf16", "i8mm"),
        (f"{NEON} asimddp", "dotprod"),
        (f"{NEON} i8mm", "neon"),
        ("fp", "scalar"),
    ],
)
def test_without_the_library_features_of_an_arm_processor_tell(
    features: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(
        f"processor\t: 0\nBogoMIPS\t: 100.00\nFeatures\t: {features}\nCPU part\t: 0xd0c\n"
    )
    monkeypatch.setattr(instructions, "_CPUINFO", tmp_path / "cpuinfo")
    assert instructions_here() == expected


@pytest.mark.usefixtures("without_library")
@pytest.mark.parametrize(
    ("machine", "expected"),
    [("x86_64", "avx2"), ("AMD64", "avx2"), ("aarch64", "neon"), ("arm64", "neon"), ("riscv64", "scalar")],
)
def test_without_flags_it_is_what_all_such_machines_have(
    machine: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instructions, "_CPUINFO", tmp_path / "none")
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert instructions_here() == expected
