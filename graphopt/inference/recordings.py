"""Recordings become features: WAV files are read, and transformers computes what an encoder of sound takes."""

from __future__ import annotations

import importlib
import wave
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from graphopt.artifact.hf_config import PREPROCESSOR, PROCESSOR
from graphopt.errors import InputError, MissingDependencyError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

# Bytes of a sample, its type, and what is subtracted: samples of one byte have no sign.
_SAMPLES = {1: ("u1", 128), 2: ("<i2", 0), 4: ("<i4", 0)}


def features_of_files(folder: Path, files: Sequence[Path]) -> npt.NDArray[np.float32]:
    """Return the features of recordings, float32 [recordings, bands, frames].

    Args:
        folder: of the model, with its ``preprocessor_config.json``.
        files: WAV files of as many samples a second as the model was trained with.

    Raises:
        InputError: the folder does not say how features are made, or a file cannot be read, is too long, or has another
            rate.
        MissingDependencyError: transformers is not installed.
    """
    extractor = extractor_of(folder)
    rate, longest = int(extractor.sampling_rate), getattr(extractor, "n_samples", None)
    samples = [read_wav(file, rate) for file in files]
    for file, recording in zip(files, samples, strict=True):
        if longest is not None and len(recording) > longest:
            raise InputError(
                f"the recording has {len(recording) / rate:.1f} seconds, the model reads {longest / rate:.0f} at once",
                file=file,
                remedy="cut it into shorter ones",
            )
    features: npt.NDArray[np.float32] = extractor(samples, sampling_rate=rate, return_tensors="np")["input_features"]
    return features.astype(np.float32, copy=False)


def has_processor(source: str | Path) -> bool:
    """Return whether a folder says how signals become numbers; a model on the hub may."""
    folder = Path(source)
    return not folder.is_dir() or any((folder / name).is_file() for name in (PREPROCESSOR, PROCESSOR))


def extractor_of(source: str | Path) -> Any:
    """Return what makes features of recordings, as transformers has it.

    Args:
        source: the folder of a model, or its id on the hub.

    Raises:
        InputError: the folder does not say how features are made.
        MissingDependencyError: transformers is not installed.
    """
    if not has_processor(source):
        raise InputError(
            "the model does not say how a recording becomes features",
            file=Path(source) / PREPROCESSOR,
            remedy="put the file of the checkpoint there",
        )
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise MissingDependencyError(
            f"features of recordings need transformers ({error})", remedy='pip install "graphopt[export]"'
        ) from error
    return transformers.AutoFeatureExtractor.from_pretrained(source, trust_remote_code=False)


def read_wav(file: Path, rate: int) -> npt.NDArray[np.float32]:
    """Return the samples of a WAV file between -1 and 1, the mean of its channels.

    Args:
        file: the file, of integers.
        rate: samples a second that it must have.

    Raises:
        InputError: it is no such file.
    """
    try:
        with wave.open(str(file), "rb") as stream:
            width, channels, file_rate = stream.getsampwidth(), stream.getnchannels(), stream.getframerate()
            content = stream.readframes(stream.getnframes())
    except (OSError, EOFError, wave.Error) as error:
        raise InputError(
            f"the recording cannot be read: {error}", file=file, remedy="give a WAV file of integers"
        ) from error
    command = f"ffmpeg -i {file.name} -ar {rate} -ac 1 -c:a pcm_s16le OUT.wav"
    if width not in _SAMPLES or file_rate != rate:
        raise InputError(
            f"the recording has {8 * width} bits and {file_rate} samples a second, and the model takes {rate}",
            file=file,
            remedy=f"convert it: {command}",
        )
    kind, zero = _SAMPLES[width]
    numbers = (np.frombuffer(content, kind).astype(np.float64) - zero) / (1 << (8 * width - 1))
    samples: npt.NDArray[np.float32] = numbers.reshape(-1, channels).mean(axis=1).astype(np.float32)
    if not len(samples):
        raise InputError("the recording is empty", file=file)
    return samples
