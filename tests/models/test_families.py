"""The list of families that are known to enter."""

from __future__ import annotations

import json

import transformers
from typer.testing import CliRunner

from graphopt.analysis.structure.ports import GROWING, INDEXER, RECURRENT
from graphopt.cli.entry import app
from graphopt.models.families import FAMILY_GROUPS
from tests import families


def test_what_tests_export_is_listed() -> None:
    without_head = families.FAMILIES | families.RECURRENT | families.SUBSTITUTED_MODULES | families.ENCODERS
    configs = [config for config, _ in without_head.values()]
    configs += [config for _, config, _ in (families.HEADS | families.TOWERS).values()]
    model_types = {getattr(transformers, config).model_type for config in configs}
    names = [name for group in FAMILY_GROUPS for name in group.families]
    assert model_types <= set(names)
    assert len(names) == len(set(names))
    assert set(names) <= set(transformers.CONFIG_MAPPING)
    assert {state for group in FAMILY_GROUPS for state in group.states} == {*GROWING, INDEXER, *RECURRENT}


def test_the_command_prints_them() -> None:
    groups = json.loads(CliRunner().invoke(app, ["families", "--json"]).stdout)
    assert [group["kind"] for group in groups] == [group.kind for group in FAMILY_GROUPS]
    table = CliRunner().invoke(app, ["families"]).stdout
    assert "qwen3_next" in table
    assert "selective scan" in table
