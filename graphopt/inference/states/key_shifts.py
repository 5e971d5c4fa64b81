"""How keys change where their tokens move: positional integrity encoding (PIE, He et al. 2024, arXiv 2407.03157).

    key at p = M_p x                     the part of the graph between a source and the key, whatever its operators are
    key at p + d = M_{p+d} M_p^-1 (key at p) = R_d (key at p)

The part is run by onnxruntime on the columns of the identity, so M_p holds all of it: rotary embeddings of any pairs,
of some of the channels, stretched and scaled, and what stands behind them, such as a Hadamard transform. A rotary
embedding turns by angles that are a multiple of the position, so that R_d is the same for all p. That is not assumed:
random keys at each position that moves are held against it.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from graphopt.analysis.structure.key_positions import KeyPart, cut_out, key_parts
from graphopt.analysis.structure.ports import NEW_LENGTH, PAST_LENGTH, POSITION_IDS
from graphopt.errors import InputError
from graphopt.graph.onnx_file import load
from graphopt.ort.runner import Runner
from graphopt.ort.session import run

if TYPE_CHECKING:
    from collections.abc import Sequence

    import onnx_ir as ir
    import onnxruntime

    from graphopt.inference.session import Session
    from graphopt.tasks.ports import IntArray

Array = npt.NDArray[Any]
Singles = npt.NDArray[np.float32]

_ROWS = 256
"""Positions that are looked at in one run."""

_SAMPLES = 16
"""Positions at which all layers are looked at."""

_TOLERANCE = 1e-3
"""Of a key, how far it may be from where R_d turns it: float32 and a sum of 1024 channels stay a tenth of that away."""

_ANGLE = 2.0**-22
"""Of the position, how much more: an angle is its product with a frequency up to 1, rounded in float32, and R_d and
both keys have one each."""


class KeyShifts:
    """The matrices by which the keys of a model turn.

    Args:
        session: a model whose caches lie in pages.

    Raises:
        InputError: its keys are not the only numbers that know positions, or they are made of more than their sources.
    """

    def __init__(self, session: Session) -> None:
        self._file, self._interface = session.file, session.interface
        model = load(session.file)
        try:
            self._parts = key_parts(model.graph)
        except InputError as error:
            raise InputError(
                error.message, file=session.file, node=error.node, tensor=error.tensor, remedy=error.remedy
            ) from error
        self._sizes = {layer.number: (layer.attributes.kv_heads, layer.head_size) for layer in session.interface.layers}
        self._turning = [part for part in self._parts if part.sources]
        self._model = cut_out(model, self._turning) if self._turning else None
        self._native = session.native

    def matrices(self, first: int, count: int, shift: int) -> list[Singles | None]:
        """Return, for each layer, what keys at ``count`` positions from ``first`` on are multiplied by.

        Args:
            first: position of the first token that moves.
            count: tokens that move.
            shift: by how many positions.

        Returns:
            float32 [KV heads, head size, head size] for each layer, to be multiplied with keys as columns; ``None``
            where nothing changes.

        Raises:
            InputError: keys at these positions do not turn alike.
        """
        if not (shift and count and self._turning):
            return [None] * len(self._parts)
        last, worst = first + count - 1, (0.0, 0)
        for begin in dict.fromkeys((max(0, -shift), first)):
            turns = self._turns(begin, shift)
            worst = self._worst_error(turns, first, count, shift)
            if worst[0] <= _TOLERANCE + _ANGLE * (max(last, last + shift) + 1):
                return [turns.get(part.layer) for part in self._parts]
        raise InputError(
            f"keys of layer {worst[1]} do not turn alike where {count} tokens from position {first} on move by "
            f"{shift}: they are off by {worst[0]:.2g} of a key",
            file=self._file,
            remedy="read the text again: the rotary embedding depends on how long a text is",
        )

    def _turns(self, position: int, shift: int) -> dict[int, Singles]:
        """Return R_d from the keys at ``position`` and ``position + shift``, by layer."""
        count = max(self._width(part) for part in self._turning)
        identities = {part.layer: np.eye(count + 1, self._width(part), dtype=np.float32) for part in self._turning}
        before, after = (
            self._keys(identities, np.full(count + 1, start), list(identities))
            for start in (position, position + shift)
        )
        turns: dict[int, Singles] = {}
        equal_layers: dict[tuple[bytes, bytes], Singles] = {}
        for part in self._turning:
            size = self._width(part)
            maps = [keys[part.layer] for keys in (before, after)]
            if any(np.abs(numbers[size:]).max() > _TOLERANCE for numbers in maps):
                raise self._form_error(part, "a constant is added to them")
            content = (maps[0].tobytes(), maps[1].tobytes())
            if content not in equal_layers:
                equal_layers[content] = self._turn_of(part, *(numbers[:size] for numbers in maps))
            turns[part.layer] = equal_layers[content]
        return turns

    def _turn_of(self, part: KeyPart, before: Singles, after: Singles) -> Singles:
        """Return R_d [KV heads, head size, head size] for keys of the identity, whose rows are columns of M."""
        heads, size = self._sizes[part.layer]
        try:
            turn = np.linalg.solve(before.astype(np.float64), after.astype(np.float64)).T
        except np.linalg.LinAlgError as error:
            raise self._form_error(part, "keys without positions cannot be found from them") from error
        blocks = turn.reshape(heads, size, heads, size)
        of_heads = np.stack([blocks[head, :, head] for head in range(heads)])
        is_apart = ~np.eye(heads, dtype=bool)
        if not np.isfinite(turn).all() or (np.abs(blocks.swapaxes(1, 2)[is_apart]).max(initial=0) > _TOLERANCE):
            raise self._form_error(part, "heads are mixed")
        return of_heads.astype(np.float32)

    def _worst_error(self, turns: dict[int, Singles], first: int, count: int, shift: int) -> tuple[float, int]:
        """Return how far random keys are from where they would turn to, as a share of a key, and in which layer.

        Of layers that turn alike one is tried at all positions, and the others at some.
        """
        layer_of_turn = {id(turn): layer for layer, turn in turns.items()}
        random, worst = np.random.default_rng(0), (0.0, 0)
        samples = np.unique(np.linspace(first, first + count - 1, _SAMPLES).astype(np.int64))
        tries = [(samples, list(turns))]
        for begin in range(first, first + count, _ROWS):
            tries.append((np.arange(begin, min(begin + _ROWS, first + count)), list(layer_of_turn.values())))
        widest = max(map(self._width, self._turning))
        for positions, layers in tries:
            content = random.standard_normal((len(positions), widest)).astype(np.float32)
            contents = {part.layer: content[:, : self._width(part)] for part in self._turning}
            before, after = (self._keys(contents, rows, layers) for rows in (positions, positions + shift))
            for layer in layers:
                heads, size = self._sizes[layer]
                keys, target_keys = (
                    numbers[layer].reshape(-1, heads, size).swapaxes(0, 1) for numbers in (before, after)
                )
                turned_keys = keys @ turns[layer].swapaxes(-1, -2)
                error = np.linalg.norm(turned_keys - target_keys, axis=-1) / np.linalg.norm(target_keys, axis=-1)
                worst = max(worst, (float(np.nan_to_num(error, nan=np.inf).max()), layer))
        return worst

    def _width(self, part: KeyPart) -> int:
        heads, size = self._sizes[part.layer]
        return heads * size

    def _keys(self, contents: dict[int, Singles], positions: IntArray, layers: Sequence[int]) -> dict[int, Singles]:
        """Return keys of some layers, [n, KV heads x head size], for what sources hold, of the same shapes.

        Args:
            contents: of the sources of all layers.
            positions: [n].
            layers: whose keys are asked for.
        """
        count, feeds = len(positions), dict[str, Array]()
        for name in self._session_inputs & {POSITION_IDS, PAST_LENGTH, NEW_LENGTH}:
            if name == POSITION_IDS:
                feeds[name] = self._interface.position_ids(positions[:, None])
            else:
                feeds[name] = positions.astype(np.int64) if name == PAST_LENGTH else np.ones(count, np.int64)
        for part in self._turning:
            begin = 0
            for source in part.sources:
                shape = _shape_of(source, count)
                end = begin + int(np.prod(shape)) // count
                numbers = contents[part.layer][:, begin:end].reshape(shape)
                feeds[source.name or ""] = numbers.astype(source.dtype.numpy() if source.dtype else np.float32)
                begin = end
        parts = [part for part in self._turning if part.layer in layers]
        outputs = run(self._session, [part.key.name or "" for part in parts], feeds)
        return {
            part.layer: keys.reshape(count, -1).astype(np.float32) for part, keys in zip(parts, outputs, strict=True)
        }

    @cached_property
    def _session(self) -> onnxruntime.InferenceSession:
        assert self._model is not None
        with Runner(native=self._native).open_model(self._model) as session:
            return session

    @cached_property
    def _session_inputs(self) -> set[str]:
        return {node.name for node in self._session.get_inputs()}

    def _form_error(self, part: KeyPart, reason: str) -> InputError:
        return InputError(
            f"keys of layer {part.layer} are made of positions in another way than by a product: {reason}",
            file=self._file,
            tensor=part.key.name,
            remedy="read the text again",
        )


def _shape_of(source: ir.Value, batch: int) -> Sequence[int]:
    """Return the shape of a source for one token in each row; the first size that has a name is that of the batch."""
    assert source.shape is not None
    names = iter([batch])
    return [size if isinstance(size, int) else next(names, 1) for size in source.shape]
