"""Policies of caches: one file in Python, one header in C++; one file adds another, which runs by its body."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import graphopt.runtime_ops
from graphopt.passes.cache.sparse_kv import SparseKV
from graphopt.runtime_ops.kv_attention.spec import policies
from graphopt.runtime_ops.kv_attention.spec.attributes import KVAttributes
from graphopt.runtime_ops.kv_attention.spec.policies import POLICIES, Policy, policy_numbered
from graphopt.runtime_ops.kv_attention.spec.schema import SCHEMA

FILE = '''
"""Each query reads every n-th page besides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from graphopt.graph.diagnostics import Rule
from graphopt.runtime_ops.kv_attention.spec.policies.policy import Policy, candidate_pages, parameter

PAGES = Rule("tests.every-nth-page", "one page of {stride}")


@dataclass(frozen=True)
class EveryNth(Policy):
    """Every n-th page.

    Attributes:
        stride: n.
    """

    name: ClassVar[str] = "every_nth"
    number: ClassVar[int] = 4
    stride: int = parameter(0, option=4, least=0)

    @property
    def chooses(self):
        return self.stride > 0

    def pages(self, attributes, summaries, queries, position):
        candidates = candidate_pages(attributes, position)
        return candidates[candidates % self.stride == 0]

    def write_pages(self, call, query, summaries, positions, reach):
        op = call.op
        return op.Reshape(op.Equal(op.Mod(call.range(call.pages), self.stride), 0), [1, 1, 1, -1])

    def besides(self):
        return PAGES(stride=self.stride)
'''

RUN = """
import sys

from graphopt.runtime_ops.kv_attention.spec import policies

policies.__path__.append(sys.argv.pop(1))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policies")
    (folder / "every_nth.py").write_text(FILE)
    return folder


def run(folder: Path, code: str, *arguments: object) -> str:
    """Run code in a process that has one more policy, as if its file lay beside the others."""
    command = [sys.executable, "-c", RUN + code, str(folder), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_each_file_is_a_policy() -> None:
    files = {file.stem for file in Path(policies.__file__).parent.glob("*.py")} - {"__init__", "policy"}
    assert files == set(POLICIES)
    assert [policy.number for policy in POLICIES.values()] == list(range(len(POLICIES)))
    assert all(policy_numbered(policy.number) is policy for policy in POLICIES.values())
    with pytest.raises(ValueError, match=r"there is no policy 9, known are 0 \(dense\), 1 \(streaming\), 2"):
        policy_numbered(9)


def test_kernels_know_the_same_policies_in_the_same_order() -> None:
    shared = Path(graphopt.runtime_ops.__file__).parent / "kv_attention" / "shared"
    lines = re.findall(r'POLICY\(k(\w+), "(\w+)", (\w+)\)', (shared / "policy.h").read_text(encoding="utf-8"))
    with_kernel = [policy for policy in POLICIES.values() if policy.has_kernel]
    assert [name for _, name, _ in lines] == [policy.name for policy in with_kernel]
    for (_, name, states), policy in zip(lines, with_kernel, strict=True):
        text = (shared / "policies" / f"{name}.h").read_text(encoding="utf-8")
        assert f"struct {states} : AnyPolicy" in text
        assert ("kReadsAll = true" in text) == policy.reads_all
        assert ("kMayDrop = true" in text) == policy.may_drop
        assert ("kBlocks = true" in text) == policy.in_blocks
        has_lists, backends = "kLists = true" in text, shared.parent
        assert (backends / "cuda" / "policies" / f"{name}.h").exists() == has_lists
        assert (backends / "cpu" / "policies" / f"{name}.h").exists() == (has_lists or policy.in_blocks)
        for parameter in policy.parameters():
            assert f'"{parameter.name}"' in text


def test_nothing_else_in_the_kernels_tells_policies_apart() -> None:
    folder = Path(graphopt.runtime_ops.__file__).parent
    files = [file for file in folder.rglob("*") if file.suffix in (".h", ".cc", ".cu") and file.name != "policy.h"]
    assert len(files) > 50
    compared = re.compile(r"[=!]= *Policy::|case Policy::|Policy::\w+ *[=!]=")
    assert [file.name for file in files if compared.search(file.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize("policy", POLICIES.values(), ids=lambda policy: policy.name)
def test_what_it_states_fits(policy: type[Policy]) -> None:
    attributes = KVAttributes(2, 0.25, policies=(policy.number,))
    assert attributes.policy_of(1) == policy()  # what a node says by default is what the policy does
    for parameter in policy.parameters():
        parameter.check(parameter.absent)
        assert parameter.attribute(None) == parameter.absent
        assert parameter.name in {**SCHEMA.attributes, **SCHEMA.optional}
    assert policy().tokens_read(attributes, 1) == 1


def test_pages_have_one_summary(folder: Path) -> None:
    text = (folder / "every_nth.py").read_text()
    other = folder.parent / "summaries"
    other.mkdir()
    (other / "every_nth.py").write_text(text + "\n    def summary_floats(self, head_size):\n        return 1\n")
    code = """
from graphopt.runtime_ops.kv_attention.spec.attributes import KVAttributes

try:
    KVAttributes(2, 0.25, policies=(2, 4))
except ValueError as error:
    print(error)
"""
    assert "pages have one summary, and retrieval and every_nth each need their own" in run(other, code)


def test_another_file_is_another_policy(llama_artifact: Path, folder: Path, tmp_path: Path) -> None:
    """From the command line, with its option; the kernels do not know it, so the model runs by bodies."""
    # commands and runs in one process, which imports once
    code = """
import json
from pathlib import Path

import numpy as np

from graphopt.cli.entry import app
from graphopt.inference.session import load

start, commands = sys.argv[1:]
for words in json.loads(commands):
    app(words, standalone_mode=False)
ids = np.random.default_rng(0).integers(0, 300, (1, 100))
logits = {name: load(Path(start) / name).logits(ids) for name in ("all", "some", "heads", "dense")}
print(json.dumps({name: float(np.abs(logits[name] - logits["dense"]).max()) for name in logits}))
"""
    # in floats: products that round their inputs would make more of the last bits
    common = ["-r", "rotate", "--add", "sparse_kv", "--set", "sparse_kv.page=16", "--set", "sparse_kv.recent=4"]
    common += ["--set", "sparse_kv.sinks=1"]
    recipes = []
    for name, options in {
        "all": ["policy=every_nth", "stride=1"],
        "some": ["policy=every_nth", "stride=3"],
        "heads": ["policy=every_nth", "layers={1: [dense, every_nth]}"],
        "dense": ["policy=retrieval", "budget=9"],
    }.items():
        given = [word for option in options for word in ("--set", f"sparse_kv.{option}")]
        arguments = ["--output", str(tmp_path / name), "--quality-tokens", "0"]
        recipes.append(["optimize", str(llama_artifact), *arguments, *common, *given])
    explain = ["explain", str(tmp_path / "some"), "model.layers.0.self_attn.Attention"]
    shown = run(folder, code, tmp_path, json.dumps([*recipes, explain]))
    assert "one page of 3" in shown, shown
    away = json.loads(shown.splitlines()[-1])
    # sums of float32 in another order, of logits of up to 4
    assert away["all"] < 1e-4
    assert away["some"] > 1e-2
    assert away["heads"] > 0


def test_a_body_with_another_policy_is_its_reference(folder: Path) -> None:
    code = """
import json

import numpy as np

from graphopt.ort.session import run
from tests.runtime_ops.kv_cases import INPUTS, STATE, Fed, attributes_of, model_of, open_quietly, tokens_of

attributes = attributes_of(policies=(4, 1), stride=2, sinks=3, recent=9, storage="int8")
names = (*INPUTS, *STATE)
shapes = {name: (None,) * rank for name, rank in zip(names, (3, 3, 3, 1, 1, 1, 1, 4, 4, 4, 4, 4))}
session = open_quietly(model_of(attributes, shapes))
body = lambda *inputs, **attributes: run(session, None, dict(zip(names, inputs)))
tokens = tokens_of(attributes, 90, batch=2, sink_logits=True)
expected, y = Fed(attributes, tokens, 6).calls(50, 40), Fed(attributes, tokens, 6, body).calls(50, 40)
print(json.dumps([float(np.abs(expected - y).max()), float(np.abs(expected).max())]))
"""
    error, largest = json.loads(run(folder, code))
    # a kernel's bound for these is 3e-5; weights and values are of the size of 1
    assert error < 3e-5 < largest


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="Input should be 'dense', 'streaming', 'retrieval' or 'sparse_prefill'"):
        SparseKV(policy="every_nth")
