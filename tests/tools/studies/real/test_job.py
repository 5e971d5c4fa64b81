from __future__ import annotations

from pathlib import Path

import pytest

from tests import ggufs
from tests.tasks.graph import graphs
from tools.studies.real import job


def test_a_gguf_file_gives_a_row_for_each_recipe_and_one_for_its_own_codes(tmp_path: Path, llama_folder: Path) -> None:
    folder = ggufs.export_llama(llama_folder)
    (tmp_path / "tiny-float32").symlink_to(folder / "artifact")
    stages: list[str] = []
    rows = list(job.run("tiny", folder / "llama.gguf", tmp_path, ["int4-rtn", "no-such-recipe"], 64, stages.append))
    assert [row.recipe for row in rows] == ["float32", "int4-rtn", "no-such-recipe", "keep_codes"]
    first, int4, missing_recipe, own_codes = rows
    assert missing_recipe.bytes is None
    assert "no-such-recipe" in (missing_recipe.error or "")
    assert [row.error for row in (first, int4, own_codes)] == [None] * 3
    assert stages == ["tiny: dithering", "tiny: int4-rtn", "tiny: no-such-recipe", "tiny: keep_codes"]
    assert (first.bits_per_weight, first.quality) == (32, {})
    assert first.bytes is not None
    assert int4.bytes is not None
    assert int4.bytes < first.bytes / 3
    # codes that are kept move the model less than codes that are chosen anew, inputs of products are int8 in both
    assert 0 < own_codes.quality["kl_mean"] < int4.quality["kl_mean"]
    assert all(row.reply is not None for row in (first, int4, own_codes))
    assert all((row.tokens_per_second or 0) > 0 for row in (first, int4, own_codes))
    assert int4.verdict is not None


def test_an_onnx_file_gives_rows_of_outputs_and_times(tmp_path: Path) -> None:
    rows = list(job.run("sound", graphs.sound(tmp_path / "sound.onnx"), tmp_path, ["int4-rtn"], 64, lambda _: None))
    assert [(row.recipe, row.error, row.reply) for row in rows] == [("float32", None, None), ("int4-rtn", None, None)]
    assert all((row.milliseconds or 0) > 0 and row.bytes for row in rows)
    assert rows[0].bits_per_weight == 32


def test_a_reply_is_made_by_the_template_of_the_folder(llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import graphopt

    prompts: list[str] = []
    session = graphopt.load(ggufs.export_llama(llama_folder) / "artifact")
    real = graphopt.generate

    def generate(session: object, prompt: str, max_new_tokens: int) -> object:
        prompts.append(prompt)
        return real(session, prompt, max_new_tokens=2)

    monkeypatch.setattr(graphopt, "generate", generate)
    _, speed = job.answer(session, "why?")
    assert prompts == ["<user>why?"]
    assert speed > 0
