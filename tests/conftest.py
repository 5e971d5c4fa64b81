"""Small models of real families, with random weights, and exports of them, made once: :mod:`tests.cached_folders`."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import shutil
import sys
import tempfile
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
from hypothesis import settings
from onnx_ir.schemas import OpSignature

from tests import families
from tests.cached_folders import cached_folder, is_to_do
from tests.checkpoints import EXPORTS, FOLDERS, HUB, know_torchlib, save_tokenizer, write_checkpoint
from tests.runtime_ops.cuda import interface
from tests.runtime_ops.cuda import interpreted as interpreter

# Tests make graphs of many small objects, and torch is made of more. By default Python's collector goes through them
# each time that 700 have come, which takes a tenth of an export.
gc.set_threshold(200_000, 20, 100)

# Set before any import. No test may use the network; each worker of pytest-xdist computes on one core.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch makes this folder when it is imported; tests look for temporary files that are left.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir()) / "torchinductor-of-tests"))

# Shared cores make an example's time mean nothing; CI draws the same examples every time, a developer new ones.
settings.register_profile("graphopt", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("graphopt")

# The families whose exports are tested in detail: each has a feature that the others here lack.
FAMILIES = {family: families.FAMILIES[family] for family in ("llama", "qwen2", "gpt2", "gpt_neox", "phi3", "gemma3")}


@pytest.fixture(autouse=True)
def gradients_stay_enabled() -> Iterator[None]:
    """Refuse a test that leaves torch without gradients: others in its process would fail, in some orders only."""
    yield
    if "torch" in sys.modules:
        assert sys.modules["torch"].is_grad_enabled(), "torch.set_grad_enabled(False) outlives this test"


@pytest.fixture(scope="session", autouse=True)
def signatures_are_derived_once() -> Iterator[None]:
    """Keep the signatures of ONNX's ops: onnxscript derives one for each node it adds, half of a body's time."""
    derive, signatures = OpSignature.from_op_schema, {}

    def signature_of(schema: onnx.defs.OpSchema) -> OpSignature:
        if schema.domain:
            return derive(schema)
        key = schema.name, schema.since_version
        if key not in signatures:
            signatures[key] = derive(schema)
        return signatures[key]

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(OpSignature, "from_op_schema", staticmethod(signature_of))
        yield


@pytest.fixture(scope="session", autouse=True)
def protocols_are_read_once() -> Iterator[None]:
    """Keep what attributes a protocol has, as Python does from 3.12 on: onnx_ir asks at each `isinstance`."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        if sys.version_info < (3, 12):
            for name in ("_get_protocol_attrs", "_is_callable_members_only"):
                monkeypatch.setattr(typing, name, functools.cache(getattr(typing, name)))
        yield


@pytest.fixture(scope="session", autouse=True)
def torchlib_is_known() -> Iterator[None]:
    """Let each export of the tests keep what torch would list again, see :func:`tests.checkpoints.know_torchlib`."""
    from graphopt.models import trace

    import_packages = trace.import_export_packages

    def import_and_know() -> tuple[Any, Any]:
        packages = import_packages()
        know_torchlib()
        return packages

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(trace, "import_export_packages", import_and_know)
        yield


@pytest.fixture(scope="session", autouse=True)
def commands_are_built_once() -> Iterator[None]:
    """Keep the parser of an app: Typer makes one of the signatures of all commands each time that it is called."""
    import typer.main
    import typer.testing

    build = functools.lru_cache(maxsize=8)(typer.main.get_command)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(typer.main, "get_command", build)
        monkeypatch.setattr(typer.testing, "_get_command", build)
        yield


@pytest.fixture(scope="session", autouse=True)
def default_text_is_read_once() -> Iterator[None]:
    """Keep the modules of Python that statistics are collected on by default: all files of a folder of thousands."""
    from graphopt.artifact import tokens

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(tokens, "training_texts", functools.cache(tokens.training_texts))
        yield


def pytest_collection_finish() -> None:
    """Let the garbage collector pass over what modules and tests are made of: millions of objects that stay."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def sessions_compute_on_one_core() -> Iterator[None]:
    """Give sessions one thread where onnxruntime may choose: threads of several workers would wait in busy loops."""
    import onnxruntime

    class OneThread(onnxruntime.SessionOptions):
        def __init__(self) -> None:
            super().__init__()
            self.intra_op_num_threads = 0

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, 1 if (name, value) == ("intra_op_num_threads", 0) else value)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(onnxruntime, "SessionOptions", OneThread)
        yield


@pytest.fixture(scope="session", autouse=True)
def verdicts_read_few_tokens() -> Iterator[None]:
    """Judge what :func:`graphopt.optimize` makes on 64 tokens by default: 1022 take as long as a small compile."""
    from graphopt.compile.pipeline import optimize

    assert optimize.__kwdefaults__ is not None
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setitem(optimize.__kwdefaults__, "quality_tokens", 64)
        yield


@pytest.fixture(scope="session")
def make_folder() -> Callable[[str], Path]:
    """Return a function that makes the Hugging Face folder of a family."""

    return lambda family: cached_folder(f"{family}-folder", FOLDERS, lambda folder: write_checkpoint(family, folder))


@pytest.fixture(scope="session")
def make_artifact(make_folder: Callable[[str], Path], request: pytest.FixtureRequest) -> Callable[[str], Path]:
    """Return a function that exports a family of :mod:`tests.families` and gives the artifact's folder."""

    def write(family: str, folder: Path) -> None:
        from graphopt.models.export import export

        export(make_folder(family), folder)

    parameters = (item.callspec.params for item in request.session.items if hasattr(item, "callspec"))
    requested_families = {values.get("family") for values in parameters}
    heads = families.HEADS | families.TOWERS | families.SEQ2SEQ
    exportable_families = (
        families.FAMILIES | families.RECURRENT | families.SUBSTITUTED_MODULES | families.ENCODERS | heads
    )
    families_to_export = sorted({"llama"} | requested_families & exportable_families.keys() - {HUB})

    def make_another() -> bool:
        """Export a family that a later test asks for and that no worker exports now, if there is one."""
        for family in families_to_export:
            if is_to_do(f"{family}-artifact", EXPORTS):
                make(family)
                return True
        return False

    def make(family: str) -> Path:
        if family == HUB:
            folder: Path = request.getfixturevalue("hub_export")
            return folder / "artifact"
        return cached_folder(f"{family}-artifact", EXPORTS, lambda folder: write(family, folder), make_another)

    return make


@pytest.fixture(scope="session")
def hub_export(make_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The export of :data:`HUB` as ``somebody/tiny`` from the hub's cache on disk, where a downloaded model lies.

    The folder ``artifact`` is the artifact, ``stages`` what the export said of its stages, ``printed`` all that reached
    the standard streams; treat them as read-only.
    """

    def write(folder: Path) -> None:
        import huggingface_hub.constants

        from graphopt.models.export import export

        hub = tmp_path_factory.mktemp("hub")
        repository = hub / "models--somebody--tiny"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text("abc")
        shutil.copytree(make_folder(HUB), repository / "snapshots" / "abc")
        folder.mkdir()
        stages: list[str] = []
        with pytest.MonkeyPatch.context() as monkeypatch, printed_to(folder / "printed"):
            monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(hub))
            export("somebody/tiny", folder / "artifact", on_stage=stages.append)
        (folder / "stages").write_text("\n".join(stages))

    return cached_folder("hub", EXPORTS, write)


@contextlib.contextmanager
def printed_to(file: Path) -> Iterator[None]:
    """Send what is printed to a file, by Python and by native code."""
    descriptors = os.dup(1), os.dup(2)
    with file.open("w") as stream, contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
        try:
            for number in (1, 2):
                os.dup2(stream.fileno(), number)
            yield
        finally:
            stream.flush()
            for number, saved_descriptor in zip((1, 2), descriptors, strict=True):
                os.dup2(saved_descriptor, number)
                os.close(saved_descriptor)


@pytest.fixture(scope="session")
def make_genai(make_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that builds a family with onnxruntime-genai's model builder and gives the folder."""

    def write(family: str, precision: str, folder: Path) -> None:
        from onnxruntime_genai.models import builder

        source, cache = (tmp_path_factory.mktemp(name) / family for name in ("sources", "cache"))
        shutil.copytree(make_folder(family), source)
        if not (source / "tokenizer.json").is_file():
            save_tokenizer(source)
        options = ("", str(source), str(folder), precision, "cpu", str(cache))
        builder.create_model(*options, **builder.parse_extra_options(*options, ["hf_token=false"]))

    def make(family: str, precision: str = "fp32") -> Path:
        return cached_folder(f"{family}-genai-{precision}", FOLDERS, lambda folder: write(family, precision, folder))

    return make


@pytest.fixture(scope="session")
def llama_folder(make_folder: Callable[[str], Path]) -> Path:
    """A Hugging Face folder of a 2-layer Llama with a byte-level BPE tokenizer."""
    return make_folder("llama")


@pytest.fixture(scope="session")
def llama_artifact(make_artifact: Callable[[str], Path]) -> Path:
    """The exported artifact of :func:`llama_folder`; treat it as read-only, and copy it to change it."""
    return make_artifact("llama")


@pytest.fixture(scope="session")
def shipped_artifact() -> Path:
    """The exported artifact of the model that graphopt ships; treat it as read-only."""

    def write(folder: Path) -> None:
        from graphopt.models.export import export

        export("stdlib_lm", folder)

    return cached_folder("shipped-artifact", (*EXPORTS, "graphopt/models/stdlib_lm/*"), write)


@pytest.fixture(scope="session")
def bert_artifact(make_artifact: Callable[[str], Path]) -> Path:
    """The exported artifact of a 2-layer BERT with a WordPiece tokenizer; treat it as read-only."""
    return make_artifact("bert")


@pytest.fixture
def llama_canonical(llama_artifact: Path) -> Any:
    """The exported Llama after canonicalize and fold_norms, in memory; a new one for each test."""
    from tests.graphs import canonical, run_pass

    model = canonical(llama_artifact)
    run_pass(model, "fold_norms")
    return model


@pytest.fixture(scope="session")
def interpreted_library() -> Path:
    """The library for GPUs, whose kernels the host interpreter runs: operators of onnxruntime's CPU provider."""
    compiler = interpreter.compiler() or pytest.skip("there is no C++ compiler")
    return interpreter.build("operators", interpreter.sources(), compiler)


@pytest.fixture(scope="session")
def interpreted(interpreted_library: Path) -> ctypes.CDLL:
    """The C interface of all CUDA operators (``cuda/c_interface.h``), whose kernels the host interpreter runs."""
    return interface.declare(interpreter.load(interpreted_library))


@pytest.fixture
def interpreted_gpu(interpreted_library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions on the device ``cuda`` work without a GPU: kernels and memory are those of the host interpreter."""
    from graphopt.inference.states.device_memory import DeviceMemory
    from graphopt.ort.session import PROVIDERS
    from graphopt.runtime_ops.library import CUDA_PATH_VARIABLE

    monkeypatch.setitem(PROVIDERS, "cuda", PROVIDERS["cpu"])
    monkeypatch.setattr(DeviceMemory, "device", "cpu")
    monkeypatch.setenv(CUDA_PATH_VARIABLE, str(interpreted_library))
