"""``graphopt diff`` tells a CI by its exit code whether two models are equal."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from graphopt.cli import app
from graphopt.report.trace import Diff
from tests.decoders import decoder
from tests.graphs import save
from tests.report.difference.test_diff import plant


def test_exit_codes_and_json(tmp_path: Path) -> None:
    after = decoder(3)
    plant(after, "weight", 2)
    files = []
    for name, model in (("before", decoder(3)), ("after", after)):
        (tmp_path / name).mkdir()
        files.append(str(save(model, tmp_path / name)))
    run = CliRunner().invoke
    assert run(app, ["diff", files[0], files[0]]).exit_code == 0
    result = run(app, ["diff", *files])
    assert result.exit_code == 1
    assert "1 edited" in result.stdout
    result = run(app, ["diff", *files, "--json"])
    assert result.exit_code == 1
    difference = Diff.model_validate(json.loads(result.stdout))
    assert difference.edges[0].before == ["up2"]
