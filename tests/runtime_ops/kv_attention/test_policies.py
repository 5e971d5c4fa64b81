"""Policies of caches: one file in Python, one header in C++; one file adds another, which runs by its body."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

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

# As files beside the others; commands, runs and a body in one process, as it imports for seconds.
RUN = """
import json
import sys
from pathlib import Path

import numpy as np

from graphopt.runtime_ops.kv_attention.spec import policies

folder, made, commands = sys.argv[1:]
policies.__path__.append(folder)

from graphopt.cli.entry import app
from graphopt.inference.session import load
from graphopt.ort.session import run
from graphopt.runtime_ops.kv_attention.spec.attributes import KVAttributes
from tests.runtime_ops.kv_cases import INPUTS, STATE, Fed, attributes_of, model_of, open_quietly, tokens_of

for words in json.loads(commands):
    app(words, standalone_mode=False)
ids = np.random.default_rng(0).integers(0, 300, (1, 100))
logits = {name: load(Path(made) / name).logits(ids) for name in ("all", "some", "heads", "dense")}

attributes = attributes_of(policies=(4, 1), stride=2, sinks=3, recent=9, storage="int8")
names = (*INPUTS, *STATE)
shapes = {name: (None,) * rank for name, rank in zip(names, (3, 3, 3, 1, 1, 1, 1, 4, 4, 4, 4, 4))}
session = open_quietly(model_of(attributes, shapes))
body = lambda *inputs, **attributes: run(session, None, dict(zip(names, inputs)))
tokens = tokens_of(attributes, 90, batch=2, sink_logits=True)
expected, y = Fed(attributes, tokens, 6).calls(50, 40), Fed(attributes, tokens, 6, body).calls(50, 40)

try:
    KVAttributes(2, 0.25, policies=(2, 5))
except ValueError as error:
    refusal = str(error)

away = {name: float(np.abs(logits[name] - logits["dense"]).max()) for name in logits}
of_body = [float(np.abs(expected - y).max()), float(np.abs(expected).max())]
print(json.dumps({"away": away, "body": of_body, "refusal": refusal}))
"""


class Said(NamedTuple):
    """What a process with two more policies printed, and what its last line says."""

    printed: str
    away: dict[str, float]
    body: tuple[float, float]
    refusal: str


@pytest.fixture(scope="module")
def said(llama_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Said:
    folder, made = (tmp_path_factory.mktemp(name) for name in ("policies", "made"))
    (folder / "every_nth.py").write_text(FILE)
    changes = {"every_nth": "summarized", "every-nth": "summarized", "[int] = 4": "[int] = 5", "stride": "every"}
    summarized = functools.reduce(lambda text, change: text.replace(*change), changes.items(), FILE)
    (folder / "summarized.py").write_text(f"{summarized}\n    def summary_floats(self, head_size):\n        return 1\n")
    # in floats: products that round their inputs would make more of the last bits
    common = ["-r", "rotate", "--add", "sparse_kv", "--set", "sparse_kv.page=16", "--set", "sparse_kv.recent=4"]
    common += ["--set", "sparse_kv.sinks=1"]
    commands = []
    for name, options in {
        "all": ["policy=every_nth", "stride=1"],
        "some": ["policy=every_nth", "stride=3"],
        "heads": ["policy=every_nth", "layers={1: [dense, every_nth]}"],
        "dense": ["policy=retrieval", "budget=9"],
    }.items():
        given = [word for option in options for word in ("--set", f"sparse_kv.{option}")]
        arguments = ["--output", str(made / name), "--quality-tokens", "0"]
        commands.append(["optimize", str(llama_artifact), *arguments, *common, *given])
    commands.append(["explain", str(made / "some"), "model.layers.0.self_attn.Attention"])
    command = [sys.executable, "-c", RUN, str(folder), str(made), json.dumps(commands)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return Said(done.stdout, **json.loads(done.stdout.splitlines()[-1]))


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


def test_pages_have_one_summary(said: Said) -> None:
    assert "pages have one summary, and retrieval and summarized each need their own" in said.refusal


def test_another_file_is_another_policy(said: Said) -> None:
    """From the command line, with its option; the kernels do not know it, so the model runs by bodies."""
    assert "one page of 3" in said.printed, said.printed
    # sums of float32 in another order, of logits of up to 4
    assert said.away["all"] < 1e-4
    assert said.away["some"] > 1e-2
    assert said.away["heads"] > 0


def test_a_body_with_another_policy_is_its_reference(said: Said) -> None:
    error, largest = said.body
    # a kernel's bound for these is 3e-5; weights and values are of the size of 1
    assert error < 3e-5 < largest


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="Input should be 'dense', 'streaming', 'retrieval' or 'sparse_prefill'"):
        SparseKV(policy="every_nth")
