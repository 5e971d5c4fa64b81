from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from graphopt.artifact.hf_config import ModelFacts, facts_of_config


@pytest.mark.parametrize(
    ("config", "generation", "facts"),
    [
        ({}, None, ModelFacts()),
        (
            {"architectures": ["A", "B"], "max_position_embeddings": 5, "bos_token_id": 1, "eos_token_id": 2},
            None,
            ModelFacts(architecture="A", max_positions=5, bos_token_id=1, eos_token_ids=[2]),
        ),
        ({"eos_token_id": 2}, {"eos_token_id": [3, 4]}, ModelFacts(eos_token_ids=[3, 4])),
        ({"eos_token_id": None, "architectures": None}, {}, ModelFacts()),
        ({"text_config": {"max_position_embeddings": 6}}, None, ModelFacts(max_positions=6)),
    ],
)
def test_facts(config: dict[str, Any], generation: dict[str, Any] | None, facts: ModelFacts, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert facts_of_config(tmp_path) == facts


def test_facts_without_configuration(tmp_path: Path) -> None:
    assert facts_of_config(tmp_path) == ModelFacts()
