"""A model of images or recordings, opened in onnxruntime: files in, its outputs for each of them out.

The processor of the checkpoint turns a file into numbers: those of transformers for images run on Pillow and NumPy.
Files run one by one, since they may have unlike sizes and padding would change what is computed.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from graphopt.analysis.structure.ports import PIXEL_VALUES
from graphopt.artifact.hf_config import PREPROCESSOR
from graphopt.errors import GraphoptError, InputError, MissingDependencyError
from graphopt.inference.recordings import extractor_of, has_processor, read_wav
from graphopt.inference.session import OpenModel, open_folder
from graphopt.ort.session import run
from graphopt.tasks import TASKS
from graphopt.tasks.ports import Port, port_of_node
from graphopt.tasks.signals import Signals

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from graphopt.tasks.ports import Array
    from graphopt.util.targets import Device

Floats = npt.NDArray[np.float32]


def image_numbers(source: str | Path, images: Sequence[Any]) -> Mapping[str, Array]:
    """Return what the processor of a checkpoint makes of images: ``pixel_values`` float32 [images, channels, ...].

    Args:
        source: the folder of the model, or its id on the hub.
        images: images of Pillow, or uint8 [height, width, 3].

    Raises:
        InputError: the processor cannot be loaded.
        MissingDependencyError: transformers or Pillow is not installed.
    """
    processor = image_processor(source)
    numbers = processor(list(images), return_tensors="np")
    return {name: np.asarray(array) for name, array in numbers.items()}


def image_processor(source: str | Path) -> Any:
    """Return the processor of images of a checkpoint, as transformers has it, on Pillow and NumPy.

    Raises:
        InputError: it cannot be loaded.
        MissingDependencyError: transformers or Pillow is not installed.
    """
    try:
        transformers = importlib.import_module("transformers")
        importlib.import_module("PIL.Image")
    except ImportError as error:
        raise MissingDependencyError(
            f"reading images needs transformers and Pillow ({error})", remedy='pip install "graphopt[export,vision]"'
        ) from error
    try:
        return transformers.AutoImageProcessor.from_pretrained(source, backend="pil", trust_remote_code=False)
    except Exception as error:
        raise InputError(
            f"transformers cannot load the processor of images: {str(error).splitlines()[0]}",
            file=source,
            remedy=f"is its {PREPROCESSOR} there, and whole?",
        ) from error


def read_image(file: Path) -> Any:
    """Return an image of Pillow in red, green and blue.

    Raises:
        InputError: it cannot be read.
        MissingDependencyError: Pillow is not installed.
    """
    try:
        pillow = importlib.import_module("PIL.Image")
    except ImportError as error:
        raise MissingDependencyError(
            f"reading images needs Pillow ({error})", remedy='pip install "graphopt[vision]"'
        ) from error
    try:
        with pillow.open(file) as image:
            return image.convert("RGB")
    except (OSError, ValueError, SyntaxError, pillow.DecompressionBombError) as error:
        raise InputError(
            f"the image cannot be read: {error}", file=file, remedy="give a PNG, JPEG or other file that Pillow reads"
        ) from error


def recording_numbers(source: str | Path, recordings: Sequence[Floats]) -> Mapping[str, Array]:
    """Return what the processor of a checkpoint makes of samples between -1 and 1.

    Args:
        source: the folder of the model, or its id on the hub.
        recordings: float32 [samples] each, of as many a second as the model was trained with.

    Raises:
        InputError: the folder does not say how features are made.
        MissingDependencyError: transformers is not installed.
    """
    extractor = extractor_of(source)
    numbers = extractor(list(recordings), sampling_rate=extractor.sampling_rate, return_tensors="np")
    return {name: np.asarray(array) for name, array in numbers.items()}


@dataclass(frozen=True)
class SignalSession:
    """A model of images or recordings that is ready to run.

    Attributes:
        model: the model with its manifest.
        task: which kind it is.
    """

    model: OpenModel
    task: Signals

    @property
    def ports(self) -> list[Port]:
        """The inputs."""
        return [port_of_node(node) for node in self.model.inference.get_inputs()]

    @property
    def outputs(self) -> dict[str, Port]:
        """The outputs by name."""
        return {node.name: port_of_node(node) for node in self.model.inference.get_outputs()}

    @property
    def labels(self) -> list[str]:
        """The names of the classes that the checkpoint states; the last class of a detector may have none."""
        return self.model.manifest.model.labels

    def read_file(self, file: Path) -> Array:
        """Return a file as the model takes it, [1, ...].

        Raises:
            InputError: it cannot be read, or the folder does not say how it becomes numbers.
            MissingDependencyError: transformers, or Pillow for an image, is not installed.
        """
        folder, name = self.model.file.parent, self.task.signal_port(self.ports).name
        if not has_processor(folder):
            raise InputError(
                f"the model does not say how {self.task.reads} become numbers",
                file=folder / PREPROCESSOR,
                remedy="put the file of the checkpoint there",
            )
        if name == PIXEL_VALUES:
            return image_numbers(folder, [read_image(file)])[name]
        return recording_numbers(folder, [read_wav(file, int(extractor_of(folder).sampling_rate))])[name]

    def run(self, signals: Array) -> dict[str, Array]:
        """Return the outputs that are of use, by name, for signals [batch, ...].

        Raises:
            InputError: the signals have another shape than the graph takes, or the run fails.
            GraphoptError: an output is NaN or infinite.
        """
        ports = self.ports
        shape = self.task.signal_port(ports).shape
        sizes = [*signals.shape[1:]]
        if len(shape) != signals.ndim or any(
            dimension not in (None, size) for dimension, size in zip(shape[1:], sizes, strict=True)
        ):
            raise InputError(
                f"a signal has the shape {sizes}, and the graph takes {list(shape[1:])}",
                file=self.model.file,
                remedy=f"make it with the {PREPROCESSOR} of this model",
            )
        names = self.task.compared_outputs(self.outputs)
        try:
            arrays = run(self.model.inference, list(names), self.task.feeds_of(ports, signals))
        except Exception as error:
            raise InputError(f"onnxruntime cannot run the model: {error}", file=self.model.file) from error
        for name, array in zip(names, arrays, strict=True):
            if not np.isfinite(array).all():
                raise GraphoptError(
                    "an output of the model is not finite",
                    file=self.model.file,
                    tensor=name,
                    remedy="the weights or the precision are at fault: compare with the model it was made from",
                )
        return dict(zip(names, arrays, strict=True))

    def transcribe(self, logits: Array) -> str:
        """Return the text that ``logits`` [frames, letters] of a recording spell.

        Raises:
            InputError: the folder has no vocabulary that transformers can load.
        """
        folder = self.model.file.parent
        transformers = importlib.import_module("transformers")
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        except Exception as error:
            raise InputError(
                f"the letters have no names: {str(error).splitlines()[0]}",
                file=folder,
                remedy="put vocab.json and tokenizer_config.json of the checkpoint there",
            ) from error
        return str(tokenizer.decode(logits.argmax(-1)))


def load_signals(path: str | Path, *, threads: int = 0, native: bool = True, device: Device = "cpu") -> SignalSession:
    """Open an artifact folder of a model of images or recordings, or a plain ``.onnx`` file with such ports.

    Args:
        path: the folder, or the file; the files of the processor are looked for beside the model.
        threads: threads that one operator may use; 0 lets onnxruntime choose.
        native: use graphopt's own kernels where they were built.
        device: what to compute on; ``cuda`` is an NVIDIA GPU.

    Raises:
        InputError: see :func:`graphopt.inference.session.load`; or the model reads something else.
        MissingDependencyError: onnxruntime is not installed, or has no provider for the device.
    """
    return signals_of(open_folder(path, threads=threads, native=native, device=device))


def signals_of(model: OpenModel) -> SignalSession:
    """Return the model of images or recordings that was opened.

    Raises:
        InputError: it is none.
    """
    task = TASKS[model.manifest.task]
    if not isinstance(task, Signals):
        raise InputError(
            f"this model is of the kind {task.name}, which reads {task.reads}",
            file=model.file,
            remedy="give a model of images or recordings; graphopt.load opens a causal language model",
        )
    return SignalSession(model, task)
