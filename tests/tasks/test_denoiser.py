"""Denoisers of diffusers: exported, recognized, calibrated on their own sampling loops, judged by them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from typer.testing import CliRunner

import graphopt
from graphopt.cli import app
from graphopt.compile.replay import verify
from graphopt.errors import InputError
from graphopt.inference.sampling import sampling_loop
from graphopt.tasks import task_of_ports
from graphopt.tasks.denoiser import DENOISER, SCHEDULER, default_scheduler, scheduler_of
from tests.cached_folders import cached_folder
from tests.denoisers import write_denoiser

pytest.importorskip("diffusers", reason="the extra `diffusion` is not installed")

SOURCES = ("graphopt/models/denoisers.py", "graphopt/models/trace.py", "tests/denoisers.py")


def make(folder: Path) -> None:
    write_denoiser("dit", folder / "checkpoint")
    settings = {"_class_name": "DDIMScheduler", "clip_sample": True, "num_train_timesteps": 1000}
    (folder / "checkpoint" / "scheduler_config.json").write_text(json.dumps(settings))
    graphopt.export(folder / "checkpoint", folder / "float32")
    # What was found of its inputs is not kept for the denoiser that is exported next.
    assert not DENOISER.samples.is_settled


@pytest.fixture(scope="module")
def float32() -> Path:
    return cached_folder("dit", SOURCES, make) / "float32"


def test_an_export_is_what_diffusers_computes_with_its_scheduler(float32: Path) -> None:
    artifact = graphopt.read(float32)
    manifest, model = artifact.manifest, artifact.model
    assert (manifest.task, manifest.source.kind) == ("denoiser", "diffusers")
    (check,) = manifest.checks
    assert (check.status, check.figures["largest_change"] < 1e-5) == ("measured", True)
    ports = {str(value.name): [str(dim) for dim in value.shape or ()] for value in model.graph.inputs}
    assert ports == {"hidden_states": ["batch", "4", "8", "8"], "timestep": ["batch"], "class_labels": ["batch"]}
    assert [value.name for value in model.graph.outputs] == ["out_hidden_states"]
    assert scheduler_of(model)["clip_sample"]


def test_int8_is_calibrated_on_a_loop_and_judged_by_loops(float32: Path, tmp_path: Path) -> None:
    manifest = graphopt.optimize(float32, "int8", tmp_path / "int8").manifest
    figures = manifest.check("quality").figures
    assert (figures["steps"], figures["samples"]) == (8, 4)
    # Matrices and their inputs to 8 bits, some 0.5% a product: seen 0.99995. Eight steps read what the one before made,
    # and this scheduler cuts off at 1, which a random model crosses everywhere: seen 0.9965.
    assert figures["cosine of calls"] > 0.9995
    assert figures["cosine_mean"] > 0.99
    (report,) = [report for report in manifest.passes if report.name == "quantize_convolutions"]
    assert [skip.reason.code for skip in report.skips] == ["quantize_convolutions.varying-range"]
    assert verify(float32, tmp_path / "int8").checks[0].status == "proved"


def test_run_makes_a_sample_of_a_seed(float32: Path, tmp_path: Path) -> None:
    lines = []
    for seed in (1, 1, 2):
        arguments = ["run", str(float32), "--seed", str(seed), "--save", str(tmp_path / "sample.npz")]
        result = CliRunner().invoke(app, arguments, catch_exceptions=False)
        lines.append(result.stdout.splitlines()[1])
    assert lines[0] == lines[1] != lines[2]
    with np.load(tmp_path / "sample.npz") as archive:
        assert archive["sample"].shape[1:] == (4, 8, 8)
    assert "20 steps of DDIMScheduler from the seed 2, told random class_labels" in result.stdout
    with pytest.raises(InputError, match="a sample of 4 channels is no image"):
        CliRunner().invoke(app, ["run", str(float32), "--save", str(tmp_path / "a.png")], catch_exceptions=False)


def test_a_loop_is_that_of_the_scheduler() -> None:
    import diffusers
    import torch

    def denoise(feeds: dict[str, np.ndarray]) -> np.ndarray:
        halves = feeds["sample"] * np.float32(0.5) + feeds["timestep"].reshape(1, 1, 1, 1) / 1000
        return np.concatenate([halves, np.zeros_like(halves)], 1)  # the variance is not read

    noise = np.random.default_rng(0).standard_normal((2, 3, 4, 4)).astype(np.float32)
    feeds = {"sample": noise, "timestep": np.zeros(1, np.float32)}
    settings = {"_class_name": "EulerDiscreteScheduler"}
    sample = sampling_loop(denoise, settings, feeds, 4, 0)
    scheduler = diffusers.EulerDiscreteScheduler()
    scheduler.set_timesteps(4)
    expected = torch.from_numpy(noise) * scheduler.init_noise_sigma
    for moment in scheduler.timesteps:
        model_input = scheduler.scale_model_input(expected, moment)
        expected = scheduler.step(model_input * 0.5 + moment / 1000, moment, expected).prev_sample
    np.testing.assert_allclose(sample, expected.numpy(), rtol=1e-5, atol=1e-5)
    with pytest.raises(InputError, match="no scheduler Unknown"):
        sampling_loop(denoise, {"_class_name": "Unknown"}, feeds, 4, 0)


def test_files_of_other_exporters_are_recognized_by_their_ports() -> None:
    text = {"sample", "timestep", "encoder_hidden_states"}
    assert task_of_ports(text, {"out_sample"}) is DENOISER
    assert task_of_ports({*text, "mask"}, {"out_sample"}) is not DENOISER
    assert task_of_ports({"sample"}, {"out_sample"}) is not DENOISER
    values = [ir.val(name, ir.DataType.FLOAT, ir.Shape(["batch", 4, 8, 8])) for name in sorted(text)]
    graph = ir.Graph(values, [], nodes=[])
    assert default_scheduler(graph)["beta_schedule"] == "scaled_linear"
    assert scheduler_of(ir.Model(graph, ir_version=10)) == default_scheduler(graph)
    model = ir.Model(graph, ir_version=10, metadata_props={SCHEDULER: '{"_class_name": "LCMScheduler"}'})
    assert scheduler_of(model) == {"_class_name": "LCMScheduler"}
