"""Storages of caches: one file each in Python, one line each in C++, and both say the same."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import graphopt.runtime_ops
from graphopt.runtime_ops.kv_attention.spec import storages
from graphopt.runtime_ops.kv_attention.spec.attributes import KVAttributes
from graphopt.runtime_ops.kv_attention.spec.storages import STORAGE_OF, Storage
from graphopt.runtime_ops.paged_attention.spec.layout import STORAGES as BLOCKS

CPP = Path(graphopt.runtime_ops.__file__).parent / "kv_attention" / "shared" / "storage.h"
INPUTS = CPP.parents[2] / "paged_attention" / "cpu" / "inputs.cc"
TYPES = {"kFloat": "float32", "kFloat16": "float16", "kBFloat16": "bfloat16", "kFloat8": "float8_e4m3fn"}
KINDS = {name: kind for kind, name in TYPES.items()}


def test_each_file_is_a_storage() -> None:
    files = {file.stem for file in Path(storages.__file__).parent.glob("*.py")} - {"__init__", "storage"}
    assert files == set(STORAGE_OF)
    assert [each.number for each in STORAGE_OF.values()] == list(range(len(STORAGE_OF)))


def test_kernels_know_the_same_storages_in_the_same_order() -> None:
    of_pages, of_blocks = CPP.read_text(encoding="utf-8").split("#define GRAPHOPT_TOKEN_STORAGES")
    lines = re.findall(r'STORAGE\(\w+, "(\w+)", (\w+), (\d+), (\d+), (\w+)<', of_pages)
    assert [name for name, *_ in lines] == [name for name, storage in STORAGE_OF.items() if storage.has_kernel]
    for name, kind, bits, levels, holds in lines:
        storage = STORAGE_OF[name]
        assert storage.dtype.name == TYPES.get(kind, "uint8")
        assert (storage.bits, storage.levels or 0) == (int(bits), int(levels))
        assert (holds == "Codes") == (storage.levels is not None)
    lines = re.findall(r'STORAGE\(\w+, "(\w+)", kUint8, (\d+), 0, Numbers<Scaled<(\d+)>>\)', of_blocks)
    assert lines == [(name, str(each.bits), str(each.bits)) for name, each in BLOCKS.items() if each.levels is not None]
    known = re.findall(r'\{"(\w+)", (\w+), Storage::k\w+\}', INPUTS.read_text(encoding="utf-8"))
    assert known == [(name, KINDS.get(each.dtype.name, "kUint8")) for name, each in BLOCKS.items()]


@pytest.mark.parametrize("storage", STORAGE_OF.values(), ids=lambda storage: storage.name)
def test_what_it_states_fits(storage: Storage) -> None:
    if storage.levels is not None:
        assert storage.levels == 2**storage.bits - 1
    else:
        assert storage.bits == 8 * storage.dtype.itemsize
    if storage.largest is not None:
        assert storage.dtype.type(storage.largest).astype(np.float32) == storage.largest
    keys = KVAttributes(2, 0.25, page=32, storage=storage.name).state(1, 3, 32).keys
    assert keys.bytes == 2 * 3 * 32 * 32 * storage.bits // 8


FILE = '''
"""Pages of codes from 0 to 99, one in a byte."""

import numpy as np

from graphopt.runtime_ops.kv_attention.spec.storages.storage import Storage

STORAGE = Storage("hundred", 9, np.dtype(np.uint8), bits=8, levels=99)
'''

RUN = """
import sys

from graphopt.runtime_ops.kv_attention.spec import storages

storages.__path__.append(sys.argv.pop(1))
"""


def run(folder: Path, code: str, *arguments: object) -> str:
    """Run code in a process that has one more storage, as if its file lay beside the others."""
    command = [sys.executable, "-c", RUN + code, str(folder), *map(str, arguments)]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def test_another_file_is_another_storage(llama_artifact: Path, tmp_path: Path) -> None:
    """From the command line; the kernels do not know it, so the model runs by bodies."""
    (tmp_path / "hundred.py").write_text(FILE)
    # several commands in one process, which imports once
    code = """
import json
from pathlib import Path

import numpy as np

from graphopt.cli.entry import app
from graphopt.inference.session import load

start, folder = sys.argv[1:]
for name in ("hundred", "int4"):
    options = ["-r", "kv4", "--set", f"quantize_kv.storage={name}", "--set", "quantize_kv.page=16"]
    options += ["--quality-tokens", "0"]
    app(["optimize", start, "--output", f"{folder}/{name}", *options], standalone_mode=False)
ids = np.random.default_rng(0).integers(0, 300, (1, 100))
float32 = load(start).logits(ids)
logits = {name: load(Path(folder) / name).logits(ids) for name in ("hundred", "int4")}
print(json.dumps({name: float(np.abs(logits[name] - float32).max()) for name in logits}))
"""
    away = json.loads(run(tmp_path, code, llama_artifact, tmp_path).splitlines()[-1])
    # steps of a hundredth are finer than those of a fifteenth
    assert 0 < away["hundred"] < away["int4"]
