"""Compare the bytes of matrices in a GGUF file with those of the same codes in an artifact, type by type.

    python tools/studies/checkpoint_sizes.py                       # every type that keeps its codes
    python tools/studies/checkpoint_sizes.py Q4_K NVFP4
    python tools/studies/checkpoint_sizes.py Q4_K --load 24        # time and memory of opening 24 products

A matrix of random blocks is decoded, replaced by its codes in the file by `keep_codes`, lowered for `ort-cpu`, and
stored by `compact_scales`; all are exact to the last bit. *Before* is without that last step. Scales of NVFP4, which
are floats of 8 bits, are those of a quantizer: the largest of 16 weights over 6. Weights of NVFP4 are normal numbers,
or with `--tails 4` of Student's distribution with 4 degrees of freedom.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import gguf
import ml_dtypes
import numpy as np
import onnx_ir as ir
import typer
from rich.console import Console
from rich.table import Table

# Run as a script, Python looks for modules in tools/ only.
sys.path.insert(0, str(Path(__file__).parents[2]))
from graphopt.analysis.structure.cost import reader_of
from graphopt.graph.weights import new_weight
from graphopt.passes.codes.keep_codes import KeepCodes
from graphopt.passes.context import make_context
from graphopt.passes.lower.compact_scales import CompactScales
from graphopt.passes.lower.lower import Lower
from graphopt.quantization.gguf.codes import KINDS
from graphopt.runtime_ops import Role, declare
from graphopt.tasks import task_of
from tests import ggufs

_ROLES = frozenset({Role.CODES, Role.SCALES, Role.ZERO_POINTS})


# Processor time of opening a session, and the resident and peak memory of its process after a run.
_OPEN = """
import json, sys, time
import numpy as np
from pathlib import Path
from graphopt.ort.session import open_session
began = time.process_time()
session = open_session(Path(sys.argv[1]))
seconds = time.process_time() - began
(port,) = session.get_inputs()
session.run(None, {port.name: np.zeros(port.shape, np.float32)})
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps([seconds, *(int(status[key].split()[0]) / 1024 for key in ("VmRSS", "VmHWM"))]))
"""


def products(matrix: np.ndarray, count: int = 1) -> ir.Model:
    """Return a chain of ``count`` products with the transpose of a square matrix, its rows shifted for each."""
    size = len(matrix)
    x = value = ir.val("x", dtype=ir.DataType.FLOAT, shape=[1, size])
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": 23}, name="products")
    for number in range(count):
        weight = new_weight(graph, f"weight{number}", ir.tensor(np.ascontiguousarray(np.roll(matrix, number, 0).T)))
        node = ir.node("MatMul", [value, weight], name=f"product{number}")
        value = node.outputs[0]
        value.name, value.dtype, value.shape = f"y{number}", ir.DataType.FLOAT, ir.Shape([1, size])
        graph.append(node)
    graph.outputs.append(value)
    return ir.Model(graph, ir_version=10)


def stored_bytes(model: ir.Model) -> int:
    """Return the bytes of codes, scales and zero points."""
    values = model.graph.initializers.values()
    tensors = [value.const_value for value in values if reader_of(value, _ROLES) is not None]
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def sizes(kind: str, size: int, load: int, tails: float | None = None) -> tuple[int, int, int]:
    """Return bytes in the file, without ``compact_scales`` and with it; print the cost of opening ``load`` products."""
    shape = (size, size)
    matrix = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
    type_of_file = gguf.GGMLQuantizationType[kind]
    if kind == "NVFP4":
        weights = matrix if tails is None else np.random.default_rng(3).standard_t(tails, shape).astype(np.float32)
        blocks = quantize_nvfp4(weights)
    else:
        blocks = ggufs.random_blocks(shape, kind) if kind in ggufs.HALVES else gguf.quantize(matrix, type_of_file)
    model = products(gguf.dequantize(blocks, type_of_file), load or 1)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "matrix.gguf"
        writer = gguf.GGUFWriter(file, "any")
        writer.add_tensor("matrix", blocks, raw_dtype=type_of_file)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        context = make_context(task_of(model.graph), "ort-cpu")
        KeepCodes(file=file)(model, context)
        Lower(target="ort-cpu", instructions="avx2", activations="float32")(model, context)
        before = stored_bytes(model)
        paths = [write(model, Path(folder) / "before")] if load else []
        CompactScales()(model, context)
        after = stored_bytes(model)
        if load:
            compare_loads(kind, [*paths, write(model, Path(folder) / "now")])
    return blocks.nbytes, before // (load or 1), after // (load or 1)


def quantize_nvfp4(matrix: np.ndarray) -> np.ndarray:
    """Return a matrix of weights of about 1 in blocks of 64: a scale in E4M3 for 16 weights, then codes of 4 bits.

    The package gguf does not write this type. A tensor of such files also has a float32 scale, which moves the others
    to where E4M3 is most precise; here weights have that size already.
    """
    groups = matrix.reshape(-1, 4, 16)
    scales = (np.abs(groups).max(-1) / 6).astype(ml_dtypes.float8_e4m3fn)
    codes = (groups / scales.astype(np.float32)[..., None]).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    pairs = codes[..., :8] | codes[..., 8:] << 4
    blocks = np.concatenate([scales.view(np.uint8), pairs.reshape(len(groups), 32)], axis=1)
    return blocks.reshape(len(matrix), -1)


def write(model: ir.Model, folder: Path) -> Path:
    """Write a model with its weights beside it."""
    folder.mkdir()
    copy = model.clone()
    declare(copy)
    ir.save(copy, folder / "model.onnx", external_data="model.onnx.data")
    return folder / "model.onnx"


def compare_loads(kind: str, paths: list[Path], rounds: int = 7) -> None:
    """Print the least cost of opening each file over rounds in turn, each in a process of its own."""
    runs: dict[Path, list[list[float]]] = {path: [] for path in paths}
    for _ in range(rounds):
        for path in paths:
            command = [sys.executable, "-c", _OPEN, str(path)]
            runs[path].append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    for path, results in runs.items():
        seconds, resident, peak = (min(column) for column in zip(*results, strict=True))
        Console().print(
            f"{kind} {path.parent.name}: {1000 * seconds:.0f} ms, {resident:.0f} MiB, at most {peak:.0f} MiB"
        )


def main(
    kinds: Annotated[list[str] | None, typer.Argument(help="types of GGML; all without")] = None,
    size: Annotated[int, typer.Option(help="rows and columns of the matrix")] = 2048,
    load: Annotated[int, typer.Option(help="also open files of this number of products")] = 0,
    tails: Annotated[float | None, typer.Option(help="degrees of freedom of the weights of NVFP4")] = None,
) -> None:
    """Print a table: bits of a weight in the file and in artifacts."""
    table = Table("type", "file, bits", "before", "now", "beside the file")
    for kind in kinds or KINDS:
        file_bits, before, after = (8 * count / size**2 for count in sizes(kind, size, load, tails))
        table.add_row(kind, f"{file_bits:.4g}", f"{before:.4g}", f"{after:.4g}", f"{after / file_bits - 1:+.1%}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
