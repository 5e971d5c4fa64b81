"""Sessions on a GPU, as far as a machine without one goes: what is asked of onnxruntime, and what is refused."""

from __future__ import annotations

from pathlib import Path

import onnxruntime
import pytest

from graphopt.compile.pipeline import optimize
from graphopt.errors import InputError, MissingDependencyError
from graphopt.inference.session import load
from graphopt.ort.session import PROVIDERS, open_session
from graphopt.runtime_ops import library_path
from graphopt.runtime_ops.library import CUDA_PATH_VARIABLE

CUDA = "CUDAExecutionProvider"

without_gpu = pytest.mark.skipif(CUDA in onnxruntime.get_available_providers(), reason="this onnxruntime has a GPU's")


@pytest.fixture(scope="module")
def rotated_artifact(llama_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact with nodes of ours."""
    folder = tmp_path_factory.mktemp("rotated") / "model"
    optimize(llama_artifact, "rotate-online", folder, run=False)
    return folder


@pytest.fixture
def provider_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An onnxruntime that says it has the provider, which then does not start."""
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA, "CPUExecutionProvider"])


@without_gpu
def test_an_onnxruntime_without_the_provider_is_named(rotated_artifact: Path) -> None:
    with pytest.raises(MissingDependencyError, match=rf"this onnxruntime \S+ has no {CUDA}.*graphopt\[gpu\]"):
        load(rotated_artifact, device="cuda")


@without_gpu
@pytest.mark.usefixtures("provider_listed")
@pytest.mark.filterwarnings("ignore:Specified provider")
def test_a_provider_that_does_not_start_is_an_error(llama_artifact: Path) -> None:
    with pytest.raises(InputError, match=f"cannot start its {CUDA}, and would run everything on the CPU"):
        open_session(llama_artifact / "model.onnx", device="cuda")


@pytest.mark.usefixtures("provider_listed")
def test_a_model_of_our_operators_needs_our_library(rotated_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CUDA_PATH_VARIABLE, "")
    assert library_path("cuda") is None
    with pytest.raises(InputError, match="kernels for NVIDIA GPUs were not built.*GRAPHOPT_CUDA=ON"):
        load(rotated_artifact, device="cuda")


@pytest.mark.usefixtures("provider_listed")
def test_the_session_is_asked_for_the_gpu_first_with_our_library(
    rotated_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = {}

    class Options(onnxruntime.SessionOptions):
        def register_custom_ops_library(self, library: str) -> None:
            calls["library"] = library

    def inference(path: str, options: Options, providers: list[tuple[str, dict[str, str]]]) -> None:
        calls["providers"] = [name for name, _ in providers]
        calls["options"] = [entries for _, entries in providers]
        raise RuntimeError("as far as this goes")

    monkeypatch.setattr(onnxruntime, "SessionOptions", Options)
    monkeypatch.setattr(onnxruntime, "InferenceSession", inference)
    monkeypatch.setenv(CUDA_PATH_VARIABLE, str(tmp_path / "ops.so"))
    with pytest.raises(InputError, match="as far as this goes"):
        load(rotated_artifact, device="cuda")
    assert calls == {
        "library": str(tmp_path / "ops.so"),
        "providers": [CUDA, "CPUExecutionProvider"],
        "options": [{"enable_skip_layer_norm_strict_mode": "1"}, {}],
    }
    assert list(PROVIDERS["cuda"]) == calls["providers"]


def test_the_library_is_found_beside_the_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(CUDA_PATH_VARIABLE, str(tmp_path / "ops.so"))
    assert library_path("cuda") == tmp_path / "ops.so"
    monkeypatch.delenv(CUDA_PATH_VARIABLE)
    library = library_path("cuda")
    if library is None:
        pytest.skip("the library of operators for GPUs is not built: no GPU, or no nvcc")
    assert library.name == "libgraphopt_ops_cuda.so"
    assert library.with_name("libgraphopt_ops.so").is_file()
