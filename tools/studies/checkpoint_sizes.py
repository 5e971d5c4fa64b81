"""Compare the bytes of matrices in a GGUF file with those of the same codes in an artifact, type by type.

    python tools/studies/checkpoint_sizes.py                       # every type that keeps its codes
    python tools/studies/checkpoint_sizes.py Q4_K NVFP4

A matrix of random blocks is decoded, found again in the file by `keep_codes`, lowered for `ort-cpu`, and stored by
`compact_scales`; both take the numbers back to the last bit. *Before* is without that last step.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Annotated

import gguf
import numpy as np
import onnx_ir as ir
import typer
from rich.console import Console
from rich.table import Table

# Run as a script, Python looks for modules in tools/ only.
sys.path.insert(0, str(Path(__file__).parents[2]))
from graphopt.analysis.structure.cost import reader_of
from graphopt.passes.codes.keep_codes import KeepCodes
from graphopt.passes.context import make_context
from graphopt.passes.lower.compact_scales import CompactScales
from graphopt.passes.lower.lower import Lower
from graphopt.quantization.gguf.codes import KINDS
from graphopt.runtime_ops import Role
from graphopt.tasks import task_of
from tests import ggufs

_ROLES = frozenset({Role.CODES, Role.SCALES, Role.ZERO_POINTS})


def product(matrix: np.ndarray) -> ir.Model:
    """Return a graph that multiplies by the transpose of a matrix."""
    rows, columns = matrix.shape
    x = ir.val("x", dtype=ir.DataType.FLOAT, shape=[1, columns])
    weight = ir.val("weight", const_value=ir.tensor(np.ascontiguousarray(matrix.T), name="weight"))
    node = ir.node("MatMul", [x, weight], name="product")
    output = node.outputs[0]
    output.name, output.dtype, output.shape = "y", ir.DataType.FLOAT, ir.Shape([1, rows])
    graph = ir.Graph([x], [output], nodes=[node], initializers=[weight], opset_imports={"": 23}, name="product")
    return ir.Model(graph, ir_version=10)


def stored_bytes(model: ir.Model) -> int:
    """Return the bytes of codes and of what turns them into numbers."""
    values = model.graph.initializers.values()
    tensors = [value.const_value for value in values if reader_of(value, _ROLES) is not None]
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def sizes(kind: str, size: int) -> tuple[int, int, int]:
    """Return bytes in the file, without ``compact_scales`` and with it."""
    shape = (size, size)
    matrix = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
    type_of_file = gguf.GGMLQuantizationType[kind]
    stored = ggufs.random_blocks(shape, kind) if kind in ggufs.HALVES else gguf.quantize(matrix, type_of_file)
    model = product(gguf.dequantize(stored, type_of_file))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "matrix.gguf"
        writer = gguf.GGUFWriter(file, "any")
        writer.add_tensor("matrix", stored, raw_dtype=type_of_file)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        context = make_context(task_of(model.graph), "ort-cpu")
        KeepCodes(file=file)(model, context)
        Lower(target="ort-cpu", instructions="avx2", activations="float32")(model, context)
        before = stored_bytes(model)
        CompactScales()(model, context)
        return stored.nbytes, before, stored_bytes(model)


def main(
    kinds: Annotated[list[str] | None, typer.Argument(help="types of GGML; all without")] = None,
    size: Annotated[int, typer.Option(help="rows and columns of the matrix")] = 2048,
) -> None:
    """Print a table: bits of a weight in the file and in artifacts."""
    table = Table("type", "file, bits", "before", "now", "beside the file")
    for kind in kinds or KINDS:
        of_file, before, now = (8 * count / size**2 for count in sizes(kind, size))
        table.add_row(kind, f"{of_file:.4g}", f"{before:.4g}", f"{now:.4g}", f"{now / of_file - 1:+.1%}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
