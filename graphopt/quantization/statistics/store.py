"""Statistics on disk: one folder for each pair of model and text, named by the content of both."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from pydantic import BaseModel, ConfigDict

from graphopt.errors import InputError
from graphopt.graph.weights.disk import writing
from graphopt.graph.weights.leaves import StoredBytes, digest_of_array
from graphopt.graph.weights.work_folder import write_whole
from graphopt.quantization.statistics.symmetric import Symmetric, packed_size, panels

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from graphopt.quantization.statistics.moments import Moments


class InputStatistics(BaseModel):
    """What the inputs of one product, or of several that share them, look like.

    Attributes:
        value: the name of the value that holds them.
        text: SHA-256 of the tokens of the texts.
        rows: numbers of a token.
        tokens: how many tokens were seen.
        dead: how many of the rows were 0 for all tokens.
        mean_square: the mean of x^2 over tokens and rows.
        largest: the largest magnitude.
        kurtosis: mean of x^4 over the squared mean of x^2: 3 for normal numbers, more where a few inputs are large.
        noise: what 4 bits in groups of 32 add, as a share of ``mean_square``: 0.0065 for normal numbers, more where a
            few numbers of a group are large.
        digest: of the content of ``hessian_file``.
        hessian_file: where X^T X / tokens lies, float32, half of its [rows, rows]: see
            :mod:`graphopt.quantization.statistics.symmetric`.
        mean_file: where the means and the largest magnitudes of all rows lie, float32 [2, rows].
        shift_digest: of the content of ``shift_file``.
        shift_file: where Y^T (X - Y) / tokens lies, float32 [rows, rows], for inputs Y that are those of a model whose
            products were rounded one after the other, and X those of the original model; ``None`` for inputs X.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    value: str
    text: str
    rows: int
    tokens: int
    dead: int
    mean_square: float
    largest: float
    kurtosis: float
    noise: float
    digest: str
    hessian_file: Path
    mean_file: Path
    shift_digest: str | None = None
    shift_file: Path | None = None

    def hessian(self) -> Symmetric:
        """Return X^T X / tokens as an expression, float32 [rows, rows]."""
        dims = (packed_size(self.rows),)
        return Symmetric(StoredBytes(str(self.hessian_file), 0, ir.DataType.FLOAT, dims, self.digest), self.rows)

    def shift(self) -> StoredBytes | None:
        """Return Y^T (X - Y) / tokens as an expression, float32 [rows, rows]; ``None`` for inputs X."""
        if self.shift_file is None:
            return None
        return StoredBytes(str(self.shift_file), 0, ir.DataType.FLOAT, (self.rows, self.rows), self.shift_digest)

    def means_and_largest(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Return the mean and the largest magnitude of each row, float32 [rows]."""
        mean, largest = np.fromfile(self.mean_file, np.float32).reshape(2, self.rows)
        return mean, largest


class Index(BaseModel):
    """What a folder of statistics holds.

    Attributes:
        inputs: by the name of the value.
        has_hessians: whether Hessians and shifts lie beside it. They do not once all that is made of them is there.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    inputs: dict[str, InputStatistics]
    has_hessians: bool = True

    def drop_hessians(self, file: Path) -> Index:
        """Remove Hessians and shifts, and return the index that says so, written to ``file`` first."""
        index = self.model_copy(update={"has_hessians": False})
        if self.has_hessians:
            write_index(index, file)
        # Also where a run was killed in between.
        for statistics in self.inputs.values():
            for large_file in (statistics.hessian_file, statistics.shift_file):
                if large_file is not None:
                    large_file.unlink(missing_ok=True)
        return index


def write_statistics(
    value: ir.Value,
    moments: Moments,
    text: str,
    folder: Path,
    number: int,
    shift: npt.NDArray[np.float64] | None = None,
) -> InputStatistics:
    """Write what was collected of one value.

    Args:
        value: which.
        moments: the sums.
        text: SHA-256 of the texts.
        folder: where files go.
        number: of the value, for their names.
        shift: the sum of Y^T (X - Y), see :class:`InputStatistics`.

    Raises:
        InputError: it is NaN or infinite, or too large for float32; or the disk is full.
    """
    tokens, rows = max(moments.tokens, 1), moments.rows
    hessian_file, mean_file = folder / f"{number}.hessian", folder / f"{number}.mean"
    diagonal, is_finite, digest = np.empty(rows, np.float32), True, hashlib.sha256(f"panels {rows}".encode())

    def mean_panels() -> Iterator[npt.NDArray[np.float32]]:
        nonlocal is_finite
        for panel, mean in zip(panels(rows), moments.squares.panels_over(tokens), strict=True):
            diagonal[panel], is_finite = np.diagonal(mean), is_finite and bool(np.isfinite(mean).all())
            digest.update(mean.data)
            yield mean

    with np.errstate(over="ignore"):
        _write(hessian_file, mean_panels(), 4 * packed_size(rows))
        vectors = np.stack([moments.total / tokens, moments.largest]).astype(np.float32)
    if not is_finite or not np.isfinite(vectors).all():
        hessian_file.unlink()
        bad = int(np.argmin(np.isfinite(diagonal)))
        raise InputError(
            f"the inputs of a product, or their squares, are NaN, infinite or too large, the first of them input {bad}",
            tensor=value.name,
            shape=[moments.tokens, moments.rows],
            remedy="the model computes such numbers on this text: calibrate on another, or round to nearest",
        )
    _write(mean_file, [vectors], vectors.nbytes)
    shift_file, shift_digest = None, None
    if shift is not None:
        mean_shift, shift_file = np.empty(shift.shape, np.float32), folder / f"{number}.shift"
        np.divide(shift, tokens, out=mean_shift, casting="same_kind")
        shift_digest = digest_of_array(mean_shift, ir.DataType.FLOAT)
        _write(shift_file, [mean_shift], mean_shift.nbytes)
    return InputStatistics(
        value=value.name or "",
        text=text,
        rows=moments.rows,
        tokens=moments.tokens,
        dead=int((diagonal == 0).sum()),
        mean_square=float(diagonal.mean(dtype=np.float64)),
        largest=float(moments.largest.max(initial=0.0)),
        kurtosis=moments.kurtosis,
        noise=moments.noise,
        digest=digest.hexdigest(),
        hessian_file=hessian_file,
        mean_file=mean_file,
        shift_digest=shift_digest,
        shift_file=shift_file,
    )


def read_index(file: Path) -> Index | None:
    """Return the index of a folder, or ``None`` where it is not complete.

    Raises:
        InputError: it is damaged.
    """
    if not file.is_file():
        return None
    try:
        index = Index.model_validate_json(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError("this is no index of statistics", file=file, remedy="remove its folder") from error
    inputs: dict[str, InputStatistics] = {}
    for name, statistics in index.inputs.items():
        sizes = {"hessian_file": 4 * packed_size(statistics.rows), "mean_file": 8 * statistics.rows}
        if statistics.shift_file is not None:
            sizes["shift_file"] = 4 * statistics.rows**2
        files = {key: file.parent / getattr(statistics, key).name for key in sizes}
        for key, size in sizes.items():
            location = files[key]
            is_dropped = key != "mean_file" and not index.has_hessians
            if not is_dropped and (not location.is_file() or location.stat().st_size != size):
                raise InputError("a file of statistics is missing or cut", file=location, remedy="remove its folder")
        inputs[name] = statistics.model_copy(update=files)
    return index.model_copy(update={"inputs": inputs})


def write_index(index: Index, file: Path) -> None:
    """Write an index so that it is there whole or not at all."""
    write_whole(file, index.model_dump_json(indent=1))


def _write(file: Path, arrays: Iterable[npt.NDArray[np.float32]], size: int) -> None:
    descriptor, name = tempfile.mkstemp(dir=file.parent)
    with writing(file.parent, size), os.fdopen(descriptor, "wb") as stream:
        for array in arrays:
            stream.write(np.ascontiguousarray(array).data)
    os.replace(name, file)
