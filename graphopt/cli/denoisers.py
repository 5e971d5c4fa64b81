"""What ``run`` does with a denoiser: a sampling loop from a seed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graphopt.cli.console import out, print_json
from graphopt.errors import InputError, MissingDependencyError

if TYPE_CHECKING:
    from pathlib import Path

    from graphopt.inference.session import OpenModel
    from graphopt.tasks.denoiser import DenoiserSamples

RUN_STEPS = 20
"""Steps of a loop."""


def print_sample(model: OpenModel, samples: DenoiserSamples, seed: int, save: Path | None, as_json: bool) -> None:
    """Make a sample of noise, and print its shape and range; with ``as_json`` all numbers.

    Args:
        model: the denoiser.
        samples: draws noise, and random conditions where the model reads any.
        seed: of both.
        save: an ``.npz`` file for the sample, or an image file where it has one or three channels.
        as_json: whether to print JSON.

    Raises:
        InputError: the model cannot be fed, or the sample is no image.
    """
    import numpy as np

    from graphopt.graph.onnx_file import load
    from graphopt.inference.graphs import outputs_by_name
    from graphopt.inference.sampling import sampling_loop
    from graphopt.tasks.denoiser import OUTPUTS, sample_name, scheduler_of

    source = load(model.file)
    samples.settle(source.graph, model.inference)
    feeds, settings = samples.draw(source.graph, seed), scheduler_of(source)
    name = OUTPUTS[sample_name(feeds)]

    def denoise(call: Any) -> Any:
        return outputs_by_name(model, dict(call), [name])[name]

    sample = sampling_loop(denoise, settings, feeds, RUN_STEPS, seed)
    if save is not None and save.suffix == ".npz":
        np.savez(save, sample=sample)
    elif save is not None:
        _save_image(save, sample)
    if as_json:
        return print_json({"seed": seed, "steps": RUN_STEPS, "sample": sample.tolist()})
    conditions = [key for key in feeds if key not in (sample_name(feeds), "timestep")]
    condition_words = f", told random {', '.join(conditions)}" if conditions else ""
    shape = f"[{', '.join(map(str, sample.shape))}]"
    lines = (
        f"{RUN_STEPS} steps of {settings['_class_name']} from the seed {seed}{condition_words}",
        f"sample {shape} from {sample.min():.4g} to {sample.max():.4g}, mean {sample.mean():.4g}",
    )
    for line in lines:
        out.print(line, highlight=False, markup=False, soft_wrap=True)
    if save is not None:
        out.print(f"written: {save}", markup=False, highlight=False, soft_wrap=True)
    return None


def _save_image(file: Path, sample: Any) -> None:
    """Write the first sample as an image: -1 is black, 1 is white."""
    import numpy as np

    channels = sample.shape[1]
    if channels not in (1, 3):
        raise InputError(
            f"a sample of {channels} channels is no image but what a decoder makes one of",
            file=file,
            remedy="give an .npz file, and decode it with the autoencoder of the pipeline",
        )
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingDependencyError(
            f"images are written by Pillow ({error})", remedy='pip install "graphopt[vision]"'
        ) from error
    pixels = np.clip((sample[0] + 1) * 127.5, 0, 255).round().astype(np.uint8).transpose(1, 2, 0)
    Image.fromarray(pixels[:, :, 0] if channels == 1 else pixels).save(file)
