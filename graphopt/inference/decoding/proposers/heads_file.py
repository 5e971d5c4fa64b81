"""``heads.onnx``: trained heads beside a model, which turn its last hidden state into states of later positions.

    states[k] = h + SiLU(h A[k] + e(token) C[k]) B[k]

    h [width]                       the state that the newest token was chosen by
    e(token) [size]                 an embedding of the newest token, of the heads' own
    A[k] [width, inner]  C[k] [size, inner]  B[k] [inner, width]

This is Medusa's residual block (Cai et al., 2024, arXiv:2401.10774, section 2.1.1) with a second matrix, and with the
newest token, which is known when a draft is made and says more of what follows than the state before it (as in Hydra,
Ankner et al., 2024, arXiv:2402.05109). What a state says of tokens the model's own lm_head tells, so that heads are
small. The file runs in any onnxruntime: ``last_hidden_state`` [batch, 1, width] and ``token`` [batch, 1] in, ``states``
[batch, heads, width] out.

The second matrix lets heads follow a model into another basis. A recipe turns the hidden state, h = h' T, and the
lm_head with it, W' = T W. Heads carry some columns of the W that they were trained with, as float16; T and its inverse
follow from those and from the columns of W', by least squares, and A' = T A, B' = B / T are the same heads in the new
basis. Where these columns do not fit, the heads are another model's.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from graphopt.analysis.structure.ports import HIDDEN
from graphopt.artifact.artifact import HEADS
from graphopt.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

TOKEN, STATES = "token", "states"
_ARRAYS = ("into", "out", "embedding", "mixed", "tokens", "columns")
_UNLIKE = 0.5
"""Share of a lm_head's columns that no turn of the hidden state explains, from which on it is another model's. Of
unrelated matrices 0.7 is left (two columns for each row), of the shipped one in int2, int3 and fp6 0.26, 0.13, 0.02."""

Floats = npt.NDArray[np.float32]


@dataclasses.dataclass(frozen=True)
class HeadsFile:
    """Trained heads.

    Attributes:
        inner: A, float32 [width, heads, inner].
        outer: B, float32 [heads, inner, width].
        embedding: e, float32 [vocabulary, size].
        token_inner: C, float32 [size, heads, inner].
        tokens: int64 [columns], which columns of its lm_head are known; none where the heads were trained on just the
            model that they lie beside.
        columns: those columns, float32 [width, columns].
    """

    inner: Floats
    outer: Floats
    embedding: Floats
    token_inner: Floats
    tokens: npt.NDArray[np.int64]
    columns: Floats

    @property
    def width(self) -> int:
        """Of the hidden state."""
        return int(self.inner.shape[0])

    @property
    def vocabulary(self) -> int:
        """Tokens of the model."""
        return int(self.embedding.shape[0])

    @property
    def count(self) -> int:
        """How many heads there are."""
        return int(self.inner.shape[1])

    @classmethod
    def load(cls, file: Path) -> HeadsFile:
        """Read the file.

        Raises:
            InputError: it is not there, or is no file of heads.
        """
        if not file.is_file():
            raise InputError(
                f"there is no {HEADS} here, so no heads to draft with",
                file=file.parent,
                remedy="tools/train/heads.py trains some; or draft with --speculate lookup",
            )
        try:
            values = ir.load(file).graph.initializers.values()
            arrays = {value.name: value.const_value.numpy() for value in values if value.const_value is not None}
            a, b, embedding, c, tokens, columns = (arrays[f"heads.{name}"] for name in _ARRAYS)
            heads, inner, width = b.shape
            return cls(
                a.astype(np.float32).reshape(width, heads, inner),
                b.astype(np.float32),
                embedding.astype(np.float32),
                c.astype(np.float32).reshape(-1, heads, inner),
                tokens.astype(np.int64),
                columns.astype(np.float32).reshape(width, len(tokens)),
            )
        except Exception as error:
            remedy = "train them again with tools/train/heads.py"
            raise InputError(f"these are no heads: {error}", file=file, remedy=remedy) from error

    def write(self, file: Path) -> None:
        """Write the file, with numbers as float16."""
        h, token = ports(self.width)
        graph = ir.Graph([h, token], [], nodes=[], opset_imports={"": 23}, name="heads")
        states = self.blocks(graph, h, token, np.float16)
        states.name = STATES
        graph.outputs.append(states)
        for name, array in (("tokens", self.tokens), ("columns", self.columns.astype(np.float16))):
            _register(graph, name, array)
        ir.save(ir.Model(graph, ir_version=10), file)

    def blocks(self, graph: ir.Graph, h: ir.Value, token: ir.Value, dtype: type[np.floating] = np.float32) -> ir.Value:
        """Append the heads to a graph.

        Args:
            graph: where to.
            h: the hidden state, float32 [batch, 1, width].
            token: the newest token, int64 [batch, 1].
            dtype: of the matrices.

        Returns:
            The states, float32 [batch, heads, width].
        """
        width, heads, inner = self.inner.shape

        def op(op_type: str, inputs: list[ir.Value], name: str, dims: list[int | str], **attributes: int) -> ir.Value:
            node = ir.node(op_type, inputs, attributes, name=f"heads.{name}")
            output = node.outputs[0]
            output.name, output.dtype, output.shape = f"heads.{name}", ir.DataType.FLOAT, ir.Shape(dims)
            graph.append(node)
            return output

        def matrix(array: Floats, name: str) -> ir.Value:
            value = _register(graph, name, array.astype(dtype))
            floats = ir.DataType.FLOAT.value
            return value if dtype == np.float32 else op("Cast", [value], f"wide_{name}", [*array.shape], to=floats)

        joint, size = ["batch", 1, heads * inner], self.embedding.shape[1]
        x = op("MatMul", [h, matrix(self.inner.reshape(width, -1), "into")], "inner", joint)
        e = op("Gather", [matrix(self.embedding, "embedding"), token], "embedded", ["batch", 1, size])
        e = op("MatMul", [e, matrix(self.token_inner.reshape(size, -1), "mixed")], "of_token", joint)
        x = op("Add", [x, e], "sum", joint)
        gate = op("Sigmoid", [x], "gate", joint)
        x = op("Mul", [x, gate], "silu", joint)
        x = op(
            "Reshape",
            [x, _register(graph, "apart", np.array([-1, heads, 1, inner]))],
            "by_head",
            ["batch", heads, 1, inner],
        )
        x = op("MatMul", [x, matrix(self.outer, "out")], "outer", ["batch", heads, 1, width])
        x = op(
            "Reshape", [x, _register(graph, "together", np.array([-1, heads, width]))], "added", ["batch", heads, width]
        )
        return op("Add", [h, x], "states", ["batch", heads, width])

    def in_basis_of(self, lm_head: Floats, file: Path) -> HeadsFile:
        """Return the same heads in the basis of another lm_head.

        Args:
            lm_head: its matrix, float32 [width, vocabulary].
            file: what errors name.

        Raises:
            InputError: the columns are not those of the same matrix in another basis.
        """
        columns = lm_head[:, self.tokens]
        turn = _fit(self.columns, columns)
        residue = float(np.linalg.norm(columns - turn @ self.columns) / np.linalg.norm(columns))
        if not residue < _UNLIKE:
            raise InputError(
                "these heads were trained for another model: "
                f"{residue:.0%} of this one's lm_head is not that of theirs",
                file=file,
                tensor="columns",
                shape=[*self.columns.shape],
                remedy="train heads for this model with tools/train/heads.py",
            )
        inverse = _fit(columns, self.columns)
        inner = np.einsum("de,ehi->dhi", turn, self.inner.astype(np.float64)).astype(np.float32)
        outer = (self.outer.astype(np.float64) @ inverse).astype(np.float32)
        return dataclasses.replace(self, inner=inner, outer=outer, columns=columns)


def ports(width: int) -> tuple[ir.Value, ir.Value]:
    """Return what heads are fed with: the hidden state float32 [batch, 1, width], and the newest token [batch, 1]."""
    return ir.val(HIDDEN, ir.DataType.FLOAT, ["batch", 1, width]), ir.val(TOKEN, ir.DataType.INT64, ["batch", 1])


def _register(graph: ir.Graph, name: str, array: np.ndarray) -> ir.Value:
    value = ir.val(f"heads.{name}", const_value=ir.tensor(array, name=f"heads.{name}"))
    graph.register_initializer(value)
    return value


def _fit(a: Floats, b: Floats) -> npt.NDArray[np.float64]:
    """Return the matrix M of the least ``|M a - b|``, for a and b [width, columns]."""
    return np.linalg.lstsq(a.T.astype(np.float64), b.T.astype(np.float64), rcond=None)[0].T
