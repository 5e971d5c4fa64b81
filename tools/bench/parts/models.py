"""Engines for whole models: each builds its folder from one checkpoint, and says how fast it decodes and prefills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench.parts.engine import optional
from tools.bench.parts.gguf_file import write_gguf
from tools.bench.parts.unavailable import UnavailableError

_WARM_UP = 8  # tokens before anything is timed


@dataclass(frozen=True)
class Work:
    """What is measured of each model, and with how many threads.

    Attributes:
        threads: of each engine.
        context: tokens that are there before the first decoded one.
        new_tokens: tokens to decode.
        prompt: tokens to prefill.
        vocabulary: tokens are drawn from below this.
        llama_cpp: a build folder of llama.cpp, if there is one.
        optimum: a Python with optimum-intel and nncf, if there is one.
    """

    threads: int
    context: int
    new_tokens: int
    prompt: int
    vocabulary: int
    llama_cpp: Path | None
    optimum: Path | None

    def tokens(self, count: int) -> list[int]:
        """Return the same random tokens for every engine."""
        ids: list[int] = np.random.default_rng(count).integers(0, self.vocabulary, count).tolist()
        return ids


@dataclass(frozen=True)
class Speeds:
    """Tokens per second."""

    decode: float
    prefill: float


@dataclass(frozen=True)
class Model:
    """One engine.

    Attributes:
        name: what the table and the JSON file call it.
        build: makes the engine's file or folder, its second argument, from a checkpoint.
        speeds: opens that, runs it and closes it again, so that no idle thread spins beside another engine.
    """

    name: str
    build: Callable[[Path, Path], None]
    speeds: Callable[[Path, Work], Speeds]


def models(recipes: list[str], work: Work) -> list[Model]:
    """Return graphopt with every recipe, and the peers."""
    candidates = [Model(f"graphopt-{Path(recipe).stem}", partial(_optimize, recipe), _graphopt) for recipe in recipes]
    # genai computes logits of all positions of a prompt unless it is built not to: both take part, the faster counts.
    candidates += [
        Model(f"genai-int4-g128{suffix}", partial(_build_genai, prune), _genai)
        for suffix, prune in (("", True), ("-all-logits", False))
    ]
    candidates.append(Model("openvino-int4-g128", partial(_build_openvino, work.optimum), _openvino))
    return candidates + [
        Model(f"llama.cpp-{type_.lower()}", partial(_build_gguf, type_, work.llama_cpp), _llama_cpp)
        for type_ in ("Q4_0", "Q6_K")
    ]


def _optimize(recipe: str, checkpoint: Path, target: Path) -> None:
    from graphopt.compile.pipeline import optimize
    from graphopt.models.export import export

    float_artifact = checkpoint.with_name("float32")
    if not float_artifact.exists():
        export(str(checkpoint), float_artifact)
    optimize(float_artifact, recipe, target, target="ort-cpu", run=False)


def _graphopt(folder: Path, work: Work) -> Speeds:
    import graphopt
    from graphopt.inference.generation import stream

    session = graphopt.load(folder, threads=work.threads)

    def first_and_rest(prompt: int, new_tokens: int) -> tuple[float, float]:
        begin = time.perf_counter()
        steps = stream(session, [work.tokens(prompt)], max_new_tokens=new_tokens + 1)
        next(steps)
        middle = time.perf_counter()
        count = sum(1 for _ in steps)
        if count != new_tokens:
            raise UnavailableError(f"it ended after {count} of {new_tokens} tokens")
        return middle - begin, time.perf_counter() - middle

    return _speeds(first_and_rest, work)


def _speeds(first_and_rest: Callable[[int, int], tuple[float, float]], work: Work) -> Speeds:
    """Return speeds from ``first_and_rest``, the seconds to the first token of a prompt and of further tokens."""
    first_and_rest(work.prompt, _WARM_UP)
    _, decode = first_and_rest(work.context, work.new_tokens)
    prefill, _ = first_and_rest(work.prompt, 1)
    return Speeds(work.new_tokens / decode, work.prompt / prefill)


def _build_genai(prune: bool, checkpoint: Path, target: Path) -> None:
    optional("onnxruntime_genai")
    options = ["block_size=128", "accuracy_level=4", f"prune_lm_head={str(prune).lower()}", "hf_token=false"]
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(checkpoint), "-o", str(target)]
    command += ["-p", "int4", "-e", "cpu", "-c", str(target.with_suffix(".cache")), "--extra_options", *options]
    _run(command)


def _genai(folder: Path, work: Work) -> Speeds:
    genai = optional("onnxruntime_genai")
    config = genai.Config(str(folder))
    config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": work.threads}}}}))
    model = genai.Model(config)

    def first_and_rest(prompt: int, new_tokens: int) -> tuple[float, float]:
        params = genai.GeneratorParams(model)
        # min_length: an end-of-text token, as good as any from random weights, must not end it.
        length = prompt + new_tokens + 1
        params.set_search_options(do_sample=False, max_length=length, min_length=length)
        generator = genai.Generator(model, params)
        begin = time.perf_counter()
        generator.append_tokens(work.tokens(prompt))
        generator.generate_next_token()
        middle = time.perf_counter()
        for _ in range(new_tokens):
            generator.generate_next_token()
        return middle - begin, time.perf_counter() - middle

    return _speeds(first_and_rest, work)


def _build_openvino(optimum: Path | None, checkpoint: Path, target: Path) -> None:
    optional("openvino_genai", package="openvino-genai")
    if optimum is None:
        raise UnavailableError("no Python with optimum-intel is named: --optimum PYTHON, or GRAPHOPT_BENCH_OPTIMUM")
    script = Path(__file__).parents[1] / "peers" / "openvino_llm.py"
    _run([str(optimum), str(script), str(checkpoint), str(target)])


def _openvino(folder: Path, work: Work) -> Speeds:
    """Return speeds from OpenVINO GenAI's own metrics: the time to the first token, and per token after it."""
    genai, openvino = optional("openvino_genai", package="openvino-genai"), optional("openvino")
    pipeline = genai.LLMPipeline(str(folder), "CPU", INFERENCE_NUM_THREADS=work.threads)

    def first_and_rest(prompt: int, new_tokens: int) -> tuple[float, float]:
        ids = np.array([work.tokens(prompt)])
        config = genai.GenerationConfig(max_new_tokens=new_tokens + 1, ignore_eos=True, do_sample=False)
        inputs = genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        metrics = pipeline.generate(inputs, config).perf_metrics
        return metrics.get_ttft().mean / 1000, metrics.get_tpot().mean * new_tokens / 1000

    return _speeds(first_and_rest, work)


def _build_gguf(type_: str, llama_cpp: Path | None, checkpoint: Path, target: Path) -> None:
    source = checkpoint.with_name("float16.gguf")
    quantize = _tool(llama_cpp, "llama-quantize")
    if not source.exists():
        write_gguf(checkpoint, source)
    _run([str(quantize), str(source), str(target), type_])


def _llama_cpp(file: Path, work: Work) -> Speeds:
    """Return what llama-bench says; it warms up by itself, and computes the logits of the last position only."""
    command = [
        str(_tool(work.llama_cpp, "llama-bench")),
        "-m",
        str(file),
        "-t",
        str(work.threads),
        "-r",
        "1",
        "-o",
        "json",
    ]

    def speed(*arguments: object) -> float:
        (result,) = json.loads(_run([*command, *map(str, arguments)]))
        return float(result["avg_ts"])

    decode = speed("-p", 0, "-n", work.new_tokens, "-d", work.context)
    return Speeds(decode, speed("-p", work.prompt, "-n", 0))


def _tool(build: Path | None, name: str) -> Path:
    if build is None:
        raise UnavailableError("no build of llama.cpp is named: --ggml FOLDER, or GRAPHOPT_BENCH_GGML")
    tool = build / "bin" / name
    if not tool.is_file():
        raise UnavailableError(f"{tool} is not there: cmake --build {build} --target {name}")
    return tool


def _run(command: list[str]) -> str:
    """Run a program offline and return what it prints.

    Raises:
        UnavailableError: it fails; its last words are passed on.
    """
    environment: dict[str, Any] = {**os.environ, "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if result.returncode:
        last = (result.stderr.strip() or result.stdout.strip()).splitlines()[-1:]
        raise UnavailableError(f"{Path(command[0]).name} fails: {' '.join(last)}")
    return result.stdout
