"""The benchmark of starts: what each process prints, and that files are found."""

from __future__ import annotations

from pathlib import Path

from tools.bench import start as bench_start


def test_a_start_is_timed_in_a_process_of_its_own(llama_artifact: Path) -> None:
    files = bench_start.model_files(llama_artifact)
    assert {file.name for file in files} == {"model.onnx", "model.onnx.data"}
    for cold in (True, False):
        bench_start.prepare(files, cold=cold)
    times = bench_start.run_program(bench_start._READ_PROGRAM, *files)
    times |= bench_start.run_program(bench_start._START, llama_artifact, 1)
    assert set(times) == set(bench_start.STAGES)
    assert all(seconds > 0 for seconds in times.values())
