"""``heads.onnx``: trained heads beside a model, which turn its last hidden state into states of later positions.

    states[k] = h + SiLU(h A[k]) B[k]        h [width], A[k] [width, inner], B[k] [inner, width]

This is Medusa's residual block (Cai et al., 2024, arXiv:2401.10774, section 2.1.1), with a second matrix. What a state
says of tokens the model's own lm_head tells, so that heads are small and have no vocabulary of their own. The file runs
in any onnxruntime: ``last_hidden_state`` [batch, 1, width] in, ``states`` [batch, heads, width] out.

The second matrix lets heads follow a model into another basis. A recipe turns the hidden state, h = h' T, and the
lm_head with it, W' = T W. Heads carry some columns of the W that they were trained with, as float16; T and its inverse
follow from those and from the columns of W', by least squares, and A' = T A, B' = B / T are the same heads in the new
basis. Where these columns do not fit, the heads are another model's.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from graphopt.analysis.ports import HIDDEN
from graphopt.artifact import HEADS
from graphopt.errors import InputError

STATES = "states"
_ABOUT = "ai.graphopt.heads"
_UNLIKE = 0.5
"""Share of a lm_head's columns that no turn of the hidden state explains, from which on it is another model's. Of
unrelated matrices 0.7 is left (two columns for each row), of the same one in the format nf3 0.2."""

Floats = npt.NDArray[np.float32]


@dataclasses.dataclass(frozen=True)
class HeadsFile:
    """Trained heads.

    Attributes:
        into: A, float32 [width, heads, inner].
        out: B, float32 [heads, inner, width].
        vocabulary: tokens of the model.
        tokens: int64 [columns], which columns of its lm_head are known; none where the heads were trained on just the
            model that they lie beside.
        columns: those columns, float32 [width, columns].
    """

    into: Floats
    out: Floats
    vocabulary: int
    tokens: npt.NDArray[np.int64]
    columns: Floats

    @property
    def width(self) -> int:
        """Of the hidden state."""
        return self.into.shape[0]

    @property
    def count(self) -> int:
        """How many heads there are."""
        return self.into.shape[1]

    @classmethod
    def read(cls, file: Path) -> HeadsFile:
        """Read the file.

        Raises:
            InputError: it is not there, or is no file of heads.
        """
        if not file.is_file():
            raise InputError(
                f"there is no {HEADS} here, so no heads to draft with",
                file=file.parent,
                remedy="tools/train_heads.py trains some; or draft with --speculate lookup",
            )
        try:
            model = ir.load(file)
            about = json.loads(model.metadata_props[_ABOUT])
            arrays = {name: value.const_value for name, value in model.graph.initializers.items()}
            into, out, tokens, columns = (arrays[f"heads.{name}"] for name in ("into", "out", "tokens", "columns"))
            assert into is not None and out is not None and tokens is not None and columns is not None
            heads, inner, width = out.shape.numpy()
            return cls(
                into.numpy().astype(np.float32).reshape(width, heads, inner),
                out.numpy().astype(np.float32),
                int(about["vocabulary"]),
                tokens.numpy().astype(np.int64),
                columns.numpy().astype(np.float32).reshape(width, -1),
            )
        except Exception as error:
            remedy = "train them again with tools/train_heads.py"
            raise InputError(f"these are no heads: {error}", file=file, remedy=remedy) from error

    def write(self, file: Path) -> None:
        """Write the file, with numbers as float16."""
        h = ir.val(HIDDEN, ir.DataType.FLOAT, ["batch", 1, self.width])
        graph = ir.Graph([h], [], nodes=[], opset_imports={"": 23}, name="heads")
        states = self.blocks(graph, h, np.float16)
        states.name = STATES
        graph.outputs.append(states)
        for name, array in (("tokens", self.tokens), ("columns", self.columns.astype(np.float16))):
            _register(graph, name, array)
        about = {"heads": self.count, "width": self.width, "vocabulary": self.vocabulary}
        ir.save(ir.Model(graph, ir_version=10, metadata_props={_ABOUT: json.dumps(about)}), file)

    def blocks(self, graph: ir.Graph, h: ir.Value, stored: type[np.floating] = np.float32) -> ir.Value:
        """Append the heads to a graph.

        Args:
            graph: where to.
            h: the hidden state, float32 [batch, 1, width].
            stored: the type of the matrices.

        Returns:
            The states, float32 [batch, heads, width].
        """
        width, heads, inner = self.into.shape

        def op(op_type: str, inputs: list[ir.Value], name: str, dims: list[int | str], **attributes: int) -> ir.Value:
            node = ir.node(op_type, inputs, attributes, name=f"heads.{name}")
            made = node.outputs[0]
            made.name, made.dtype, made.shape = f"heads.{name}", ir.DataType.FLOAT, ir.Shape(dims)
            graph.append(node)
            return made

        def matrix(array: Floats, name: str) -> ir.Value:
            value = _register(graph, name, array.astype(stored))
            floats = ir.DataType.FLOAT.value
            return value if stored == np.float32 else op("Cast", [value], f"wide_{name}", [*array.shape], to=floats)

        x = op("MatMul", [h, matrix(self.into.reshape(width, -1), "into")], "inner", ["batch", 1, heads * inner])
        gate = op("Sigmoid", [x], "gate", ["batch", 1, heads * inner])
        x = op("Mul", [x, gate], "silu", ["batch", 1, heads * inner])
        x = op(
            "Reshape",
            [x, _register(graph, "apart", np.array([-1, heads, 1, inner]))],
            "by_head",
            ["batch", heads, 1, inner],
        )
        x = op("MatMul", [x, matrix(self.out, "out")], "outer", ["batch", heads, 1, width])
        x = op(
            "Reshape", [x, _register(graph, "together", np.array([-1, heads, width]))], "added", ["batch", heads, width]
        )
        return op("Add", [h, x], "states", ["batch", heads, width])

    def turned(self, lm_head: Floats, file: Path) -> HeadsFile:
        """Return the same heads in the basis of another lm_head.

        Args:
            lm_head: its matrix, float32 [width, vocabulary].
            file: what errors name.

        Raises:
            InputError: the columns are not those of the same matrix in another basis.
        """
        if not len(self.tokens):
            return self
        there = lm_head[:, self.tokens]
        turn = _fit(self.columns, there)
        left = float(np.linalg.norm(there - turn @ self.columns) / np.linalg.norm(there))
        if not left < _UNLIKE:
            raise InputError(
                f"these heads were trained for another model: {left:.0%} of this one's lm_head is not that of theirs",
                file=file,
                tensor="columns",
                shape=[*self.columns.shape],
                remedy="train heads for this model with tools/train_heads.py",
            )
        back = _fit(there, self.columns)
        into = np.einsum("de,ehi->dhi", turn, self.into.astype(np.float64)).astype(np.float32)
        out = (self.out.astype(np.float64) @ back).astype(np.float32)
        return dataclasses.replace(self, into=into, out=out, columns=there)


def _register(graph: ir.Graph, name: str, array: np.ndarray) -> ir.Value:
    value = ir.val(f"heads.{name}", const_value=ir.tensor(array, name=f"heads.{name}"))
    graph.register_initializer(value)
    return value


def _fit(a: Floats, b: Floats) -> npt.NDArray[np.float64]:
    """Return the matrix M of the least ``|M a - b|``, for a and b [width, columns]."""
    return np.linalg.lstsq(a.T.astype(np.float64), b.T.astype(np.float64), rcond=None)[0].T
