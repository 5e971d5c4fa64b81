"""llama.cpp's quantizer on the tensors of a GGUF file, and its result as a float model.

llama.cpp is not built here: name its ``llama-quantize``. Its importance matrix, the mean squares of the inputs of each
product, is written from graphopt's statistics, so both calibrate on the same tokens. What it writes is decoded by the
package ``gguf`` and put into the float artifact: its own rounding of activations is left out, which flatters it.
"""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from graphopt.graph.weights import Expression
from graphopt.quantization.gguf.blocks import Ggml, import_gguf
from graphopt.quantization.gguf.file import GgufFile, open_gguf


def write_floats(file: GgufFile, output: Path) -> None:
    """Write ``file`` with its metadata, and its tensors in float32."""
    gguf = import_gguf()
    writer = gguf.GGUFWriter(output, file.architecture)
    for field in gguf.GGUFReader(file.path).fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
    for name, tensor in file.tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(tensor.numpy(), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_importance(mean_squares: Mapping[str, npt.NDArray[Any]], output: Path) -> None:
    """Write an importance matrix as ``llama-imatrix`` does: for each tensor the mean squares of what it multiplies."""
    with output.open("wb") as stream:
        stream.write(struct.pack("<i", len(mean_squares)))
        for name, squares in mean_squares.items():
            stream.write(struct.pack("<i", len(name)) + name.encode())
            stream.write(struct.pack("<ii", 1, len(squares)))
            stream.write(np.ascontiguousarray(squares, "<f4").tobytes())


def quantize(binary: Path, floats: Path, kind: str, importance: Path | None, output: Path) -> GgufFile:
    """Let ``llama-quantize`` write ``floats`` as the type ``kind``, such as ``Q4_K_M``, and open its file.

    Raises:
        subprocess.CalledProcessError: it failed; its own messages are printed.
    """
    matrix = [] if importance is None else ["--imatrix", str(importance)]
    command = [str(binary), *matrix, str(floats), str(output), kind, "2"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        print(result.stdout[-2000:], result.stderr[-2000:])
        result.check_returncode()
    return open_gguf(output)


def weight_bytes(file: GgufFile) -> int:
    """Return the bytes that the tensors of a file take."""
    return sum(_bytes(tensor) for tensor in file.tensors.values())


def kinds(file: GgufFile) -> str:
    """Return the types of a file's matrices, those with most bytes first; the name of a file's type names only one."""
    sizes: dict[str, int] = {}
    for tensor in file.tensors.values():
        if isinstance(tensor, Ggml) and len(tensor.shape) > 1:
            sizes[tensor.kind] = sizes.get(tensor.kind, 0) + _bytes(tensor)
    return ", ".join(sorted(sizes, key=sizes.__getitem__, reverse=True))


def _bytes(tensor: Expression) -> int:
    return tensor.blocks().nbytes if isinstance(tensor, Ggml) else tensor.nbytes
