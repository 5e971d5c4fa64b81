"""Matrices of a quantized checkpoint as expressions of its codes: one importer for each layout, found by its file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from graphopt.errors import InputError
from graphopt.graph.weights import Expression, Reshape, StoredBytes, Transpose
from graphopt.graph.weights.safetensors_files import tensors_of_folder
from graphopt.quantization.matrix_codes import CodedTensor, RepeatedRows
from graphopt.util.registry import Registry

if TYPE_CHECKING:
    from pathlib import Path

    from graphopt.graph.weights import Shape

Settings = Mapping[str, Any]
"""What a configuration says under ``quantization_config``."""


@dataclass(frozen=True)
class Layer:
    """The tensors of one quantized layer.

    Attributes:
        name: the name that the tensors begin with.
        tensors: all tensors of the checkpoint.
        settings: those of the checkpoint.
        source: the checkpoint, for errors.
    """

    name: str
    tensors: Mapping[str, Expression]
    settings: Settings
    source: str

    def part(self, name: str) -> Expression:
        """Return a tensor of the layer.

        Raises:
            InputError: there is none.
        """
        if (tensor := self.optional(name)) is None:
            raise InputError(
                f"a quantized layer ({self.settings.get('quant_method')}) lacks a tensor",
                file=self.source,
                tensor=self.name + name,
                remedy="give a complete checkpoint",
            )
        return tensor

    def optional(self, name: str) -> Expression | None:
        """Return a tensor of the layer, ``None`` where there is none."""
        return self.tensors.get(self.name + name)

    def of_shape(self, name: str, shape: Shape) -> Expression:
        """Return a tensor of the layer that must have a shape.

        Raises:
            InputError: there is none, or it has another shape.
        """
        tensor = self.part(name)
        if tensor.shape != shape:
            raise self.refusal(f"it should be {list(shape)} by the other tensors of its layer", name)
        return tensor

    def choice(self, key: str, default: Any, choices: tuple[Any, ...]) -> Any:
        """Return a setting that must be one of those known.

        Raises:
            InputError: it is another.
        """
        value = self.settings.get(key, default)
        if value not in choices:
            text = ", ".join(map(str, choices))
            raise InputError(
                f"quantization_config has {key} {value!r}, and graphopt knows {text}",
                file=self.source,
                remedy="give the original checkpoint, in 16 or 32 bits",
            )
        return value

    def refusal(self, problem: str, name: str) -> InputError:
        """Return the error that a tensor of the layer does not fit."""
        tensor = self.part(name)
        source = next((node for node in (tensor, *tensor.children) if isinstance(node, StoredBytes)), None)
        return InputError(
            f"a tensor of a quantized layer does not fit: {problem}",
            file=self.source if source is None else source.path,
            tensor=self.name + name,
            shape=tensor.shape,
            remedy="the settings in config.json and the tensors do not belong together",
        )

    def repeated_scales(self, name: str, rows: int, columns: int) -> tuple[Expression, int]:
        """Return scales as [rows, groups], and the columns of a group.

        Args:
            name: the tensor: one number, one for each row [rows] or [rows, 1], or one for each block of a matrix.
            rows: of the matrix.
            columns: of the matrix.

        Raises:
            InputError: the scales are in none of these shapes.
        """
        scales = self.part(name)
        if len(scales.shape) < 2:
            scales = Reshape.to_dims(scales, (scales.shape[0] if scales.shape else 1, 1))
        block = self._block(scales.shape, (rows, columns))
        if block is None:
            raise self.refusal(f"these are no scales of a matrix of {rows} rows and {columns} columns", name)
        return (scales if block[0] == 1 else RepeatedRows(scales, block[0], rows)), block[1]

    def _block(self, scales: Shape, matrix: Shape) -> tuple[int, int] | None:
        """Return the rows and columns that share a scale: by the settings, else by the two shapes."""
        block_size = self.settings.get("weight_block_size")
        blocks = (
            None
            if not block_size
            else tuple(-(-size // int(step)) for size, step in zip(matrix, block_size, strict=True))
        )
        if block_size and scales == blocks:
            return int(block_size[0]), int(block_size[1])
        if len(scales) != 2 or not all(scales) or matrix[0] % scales[0] or matrix[1] % scales[1]:
            return None
        return matrix[0] // scales[0], matrix[1] // scales[1]


@dataclass(frozen=True)
class Importer:
    """Reads the layout of one quantizer.

    Attributes:
        method: what ``quant_method`` is called.
        markers: ends of names of tensors that every quantized layer has one of; what is in front names the layer.
        parts: ends of names of the other tensors of a layer that are no parameters of the model.
        matrix: returns the matrix of a layer, [out, in].
        target: what is behind the name of the layer in the name of the model's parameter.
    """

    method: str
    markers: tuple[str, ...]
    parts: tuple[str, ...]
    matrix: Callable[[Layer], Expression]
    target: str = ".weight"

    def weights(self, tensors: Mapping[str, Expression], settings: Settings, source: str) -> dict[str, Expression]:
        """Return the parameters of the model by name: matrices of codes, and what was not quantized."""
        names = {name.removesuffix(marker) for name in tensors for marker in self.markers if name.endswith(marker)}
        if not names:
            raise InputError(
                f"the checkpoint says that it is quantized, but has no tensors of {self.method}",
                file=source,
                remedy="quantization_config in config.json and the files of weights do not belong together",
            )
        tensor_names = {name + part for name in names for part in (*self.markers, *self.parts)}
        weights = {name: tensor for name, tensor in tensors.items() if name not in tensor_names}
        for name in sorted(names):
            layer = Layer(name, tensors, settings, source)
            try:
                weights[name + self.target] = self.matrix(layer)
            except ValueError as error:
                first = next(name + marker for marker in self.markers if name + marker in tensors)
                raise InputError(
                    f"the tensors of a quantized layer do not fit one another ({error})",
                    file=source,
                    tensor=first,
                    shape=tensors[first].shape,
                    remedy="the settings in config.json and the tensors do not belong together",
                ) from error
        return weights


IMPORTERS: Registry[Importer] = Registry(
    "graphopt.quantization.checkpoints",
    kind="importer of codes",
    name_of=lambda member: member.method if isinstance(member, Importer) else None,
)
"""Every importer, by its ``quant_method``."""


def importer_of(settings: Settings, source: str) -> Importer:
    """Return the importer of a checkpoint.

    Raises:
        InputError: its method is unknown.
    """
    method = str(settings.get("quant_method"))
    if method not in IMPORTERS:
        raise InputError(
            f"the checkpoint is quantized already, by a method that graphopt cannot read: {method}",
            file=source,
            remedy=f"give the original one, in 16 or 32 bits; known are {', '.join(IMPORTERS)}",
        )
    return IMPORTERS[method]


def decoded_weights(tensors: Mapping[str, Expression], settings: Settings, source: str) -> dict[str, Expression]:
    """Return the parameters of a model by name, those that are codes as matrices that mean them.

    Args:
        tensors: the tensors of the checkpoint, by name.
        settings: its ``quantization_config``.
        source: the checkpoint, for errors.

    Raises:
        InputError: the method is unknown, or a tensor is missing or does not fit.
    """
    return importer_of(settings, source).weights(tensors, settings, source)


def coded_matrices(folder: Path) -> dict[str, CodedTensor]:
    """Return the matrices of a quantized checkpoint that are codes a format of ours can say, by name.

    Raises:
        InputError: the folder holds no quantized checkpoint in safetensors files, or it cannot be read.
    """
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(f"no configuration can be read ({error})", file=folder / "config.json") from error
    settings, tensors = config.get("quantization_config"), tensors_of_folder(folder)
    if not isinstance(settings, dict) or tensors is None:
        raise InputError(
            "the folder holds no quantized checkpoint in safetensors files",
            file=folder,
            remedy="give the folder that the model was exported from",
        )
    weights = decoded_weights(tensors, settings, str(folder))
    matrices = {name: _in_file_order(weight) for name, weight in weights.items()}
    return {
        name: tensor
        for name, tensor in matrices.items()
        if isinstance(tensor, CodedTensor) and tensor.coding is not None
    }


def _in_file_order(weight: Expression) -> Expression:
    """Return the matrix that a parameter holds in another shape or order, such as that of all experts."""
    while isinstance(weight, (Reshape, Transpose)):
        weight = weight.source
    return weight
