"""Storages of caches: one file each in Python, one line each in C++, and both say the same."""

from __future__ import annotations

import re
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
    assert [name for name, *_ in lines] == list(STORAGE_OF)
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
    keys = KVAttributes(2, 0.25, page=16, storage=storage.name).state(1, 3, 32).keys
    assert keys.bytes == 2 * 3 * 16 * 32 * storage.bits // 8
