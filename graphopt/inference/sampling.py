"""Samples of a diffusion model: a denoiser is called step by step, as a scheduler of diffusers says."""

from __future__ import annotations

import importlib
import inspect
from typing import TYPE_CHECKING, Any

import numpy as np

from graphopt.errors import InputError, MissingDependencyError
from graphopt.tasks.denoiser import TIMESTEP, sample_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from graphopt.tasks.ports import Array


def import_diffusers() -> tuple[Any, Any]:
    """Return the modules ``torch`` and ``diffusers``.

    Raises:
        MissingDependencyError: one of them is not installed.
    """
    try:
        return importlib.import_module("torch"), importlib.import_module("diffusers")
    except ImportError as error:
        raise MissingDependencyError(
            f"denoisers and schedulers of diffusion models need diffusers ({error})",
            remedy='pip install "graphopt[export,diffusion]"',
        ) from error


def sampling_loop(
    denoise: Callable[[Mapping[str, Array]], Array],
    settings: Mapping[str, Any],
    feeds: Mapping[str, Array],
    steps: int,
    seed: int,
) -> Array:
    """Return the samples that a denoiser makes of noise, float32 [batch, channels, height, width].

    Args:
        denoise: calls the model, see :mod:`graphopt.tasks.denoiser`.
        settings: of a scheduler of diffusers, as its ``scheduler_config.json`` holds them.
        feeds: the inputs of the model: noise as the sample, any timestep, and what the sample is made by.
        steps: of the loop.
        seed: of the noise that some schedulers add at each step.

    Raises:
        InputError: diffusers has no such scheduler.
        MissingDependencyError: torch or diffusers is not installed.
    """
    torch, diffusers = import_diffusers()
    kind = getattr(diffusers, str(settings.get("_class_name")), None)
    if kind is None:
        raise InputError(f"diffusers {diffusers.__version__} has no scheduler {settings.get('_class_name')}")
    scheduler = kind.from_config(dict(settings))
    scheduler.set_timesteps(steps)
    random = torch.Generator().manual_seed(seed)
    options = {"generator": random} if "generator" in inspect.signature(scheduler.step).parameters else {}
    name = sample_name(feeds)
    sample = torch.from_numpy(np.array(feeds[name], np.float32)) * float(getattr(scheduler, "init_noise_sigma", 1))
    channels = sample.shape[1]
    for moment in scheduler.timesteps:
        model_input = scheduler.scale_model_input(sample, moment) if hasattr(scheduler, "scale_model_input") else sample
        call = {**feeds, name: model_input.numpy(), TIMESTEP: np.full_like(feeds[TIMESTEP], moment.item())}
        # Behind the noise there may be the variance, which these schedulers do not read.
        noise = torch.from_numpy(np.array(denoise(call), np.float32)[:, :channels])
        sample = scheduler.step(noise, moment, sample, **options).prev_sample
    result: Array = sample.numpy()
    return result
