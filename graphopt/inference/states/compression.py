"""States in fewer bytes, for files: pages of codes by their entropy, everything else by that of its bytes.

After CacheGen (Liu et al., SIGCOMM 2024, arXiv 2310.07240, section 5.2): numbers of a token are near those of the token
before it, and channels differ from one another. There deltas to every tenth token are coded, per channel and layer.
Here pages are codes already, whose deltas have as many levels again, so the code of the token before is the context:

    code of a key     ~  frequencies of (class of the channel, code of the token before in that channel)
    code of a value   ~  frequencies of (class of the channel); each token has a scale of its own, so the code before it
                         says little: it would save 0.4% and take twice the time

Channels of keys with a similar mean code and a similar correlation of neighbouring tokens are one class, and so are
channels of values with a similar mean and deviation: there are 8 times 17, and 64 contexts, and not that many for each
channel. The first token of a page has no token before it: pages are read in groups that know nothing of one another.

Three levels say what may be lost (:data:`Loss`):

    none      every number comes back to the bit
    scales    codes stay; lows and steps, a ninth of the bytes of int4 pages and hardly compressible as floats, are
              rounded to what codes can tell apart; floats become float16
    values    the codes of values, which matter less than those of keys, go to the nearest multiple of 3 as well
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from graphopt.analysis.structure.paged_caches import from_json, to_json
from graphopt.errors import InputError
from graphopt.inference.states.entropy_coding import (
    SymbolReader,
    SymbolWriter,
    join,
    pack_numbers,
    split,
    unpack_numbers,
)
from graphopt.inference.states.rewinding import group_layers
from graphopt.runtime_ops.kv_attention.spec.layout import (
    LARGEST_SCALE,
    pack_keys,
    pack_values,
    unpack_keys,
    unpack_values,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from graphopt.analysis.structure.paged_caches import PagedLayer
    from graphopt.tasks.ports import IntArray

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Halves = npt.NDArray[np.float16]

GROUP_TOKENS = 1024
"""Tokens of the pages that are read together."""

_CONTEXT_BITS = 4
"""Of the code of the token before, the upper ones, that are a context."""

_NO_CODE = 1 << _CONTEXT_BITS
"""The context of a token that has none before it."""

_KEY_CLASSES, _VALUE_CLASSES = (4, 2), (16, 4)
"""By mean code, and by correlation or deviation."""

_OCTAVE, _STEP = 32, 8
"""Rounded scales: steps to a 32nd of an octave, the middle of a set to an 8th of its step. The ends of 15 levels then
move by 0.06 steps, where rounding to codes has moved numbers by 0.29 (root of mean squares)."""

_THIRD = 3


Loss = Literal["none", "scales", "values"]
"""What a file may lose of states."""


@dataclass(frozen=True)
class CodeGroup:
    """Layers whose pages of codes have the same sizes, and lie one after the other.

    Attributes:
        layers: of the graph.
        tokens: of each row, int64 [batch].
        loss: what may be lost.
    """

    layers: list[PagedLayer]
    tokens: IntArray
    loss: Loss

    @property
    def first(self) -> PagedLayer:
        """A layer of them."""
        return self.layers[0]

    @property
    def name(self) -> str:
        """What tensors of the file call it."""
        return f"codes.{self.first.number}"

    @property
    def parts(self) -> tuple[str, ...]:
        """The states that hold codes."""
        return ("keys", "values")[: self.first.attributes.parts]

    def names(self, state: str) -> list[str]:
        """Return the graph inputs of a state of all layers."""
        return [layer.port(state) for layer in self.layers]

    def divisor(self, part: str) -> int:
        """Return by what codes are divided: 1 where none is lost."""
        return _THIRD if part == "values" and self.loss == "values" else 1

    def symbols(self, part: str) -> int:
        """Return how many symbols there are of codes."""
        levels, divisor = self.levels(part), self.divisor(part)
        return (levels + divisor // 2) // divisor + 1

    def levels(self, part: str) -> int:
        """Return the largest code of keys, or of values."""
        kv = self.first.attributes
        return (kv.value_levels if part == "values" else kv.levels) or 0

    def storage(self, part: str) -> str:
        """Return how keys, or values, are stored."""
        kv = self.first.attributes
        return (kv.stored_values if part == "values" else kv.stored).name

    def contexts(self, part: str) -> int:
        """Return how many contexts a symbol has."""
        if part == "values":
            return _VALUE_CLASSES[0] * _VALUE_CLASSES[1]
        return (_KEY_CLASSES[0] * _KEY_CLASSES[1] if self.has_classes(part) else 1) * (_NO_CODE + 1)

    def has_classes(self, part: str) -> bool:
        """Return whether channels have classes: with more symbols the upper bits of the code before say enough."""
        return part == "values" or self.symbols(part) <= _NO_CODE

    def pages(self) -> Iterator[tuple[Array, Array]]:
        """Yield rows and pages, int64 [n] each, of the pages of codes that are read together.

        Pages that are still floats are none of them: their codes come when they leave the newest.
        """
        kv = self.first.attributes
        step = max(1, GROUP_TOKENS // kv.page)
        used = -(-self.tokens // kv.page)
        for begin in range(0, int(used.max(initial=0)), step):
            pages = np.arange(begin, begin + step)[None]
            rows, offsets = np.nonzero((pages < used[:, None]) & ~kv.is_recent(pages, self.tokens[:, None]))
            if len(rows):
                yield rows, begin + offsets


@dataclass(frozen=True)
class Original:
    """Bytes that states were restored from, some of which are those of the states as they are now.

    Attributes:
        get: returns the bytes of a name.
        description: what :func:`compress` returned besides.
        tokens: that each row had, int64 [batch].
        kept_tokens: that each row still has from the first on, int64 [batch]. Behind them it may have read others.
    """

    get: Callable[[str], Bytes]
    description: str
    tokens: IntArray
    kept_tokens: IntArray

    def group_like(self, group: CodeGroup) -> CodeGroup | None:
        """Return its layers of the same pages; ``None`` where they are of another kind, or lose something else."""
        facts = json.loads(self.description)
        if facts["loss"] != group.loss or len(self.tokens) != len(group.tokens):
            return None
        groups = code_groups(from_json(facts["pages"]), self.tokens, facts["loss"])
        return next((before for before in groups if before.layers == group.layers), None)

    def same_pages(self, group: CodeGroup) -> set[int]:
        """Return which of the pages that are read together have the same bytes now."""
        before, kv = self.group_like(group), group.first.attributes
        same_groups = set[int]()
        for index, (old, new) in enumerate(zip(before.pages() if before else (), group.pages(), strict=False)):
            rows, pages = new
            # what was a float when the row had no other tokens than these was rounded afterwards
            stays = ((pages + 1) * kv.page <= self.kept_tokens[rows]) & ~kv.is_recent(pages, self.kept_tokens[rows])
            if stays.all() and all(map(np.array_equal, old, new)):
                same_groups.add(index)
        return same_groups


def code_groups(layers: tuple[PagedLayer, ...], tokens: IntArray, loss: Loss) -> list[CodeGroup]:
    """Return the layers whose pages are codes and stay where they are: those of a ring are few."""
    groups = [[layers[index] for index in indices] for indices in group_layers(layers)]
    return [CodeGroup(group, tokens, loss) for group in groups if group[0].attributes.levels and not group[0].wraps]


def compress(
    arrays: Mapping[str, Array],
    layers: tuple[PagedLayer, ...],
    tokens: IntArray,
    loss: Loss,
    original: Original | None = None,
) -> tuple[dict[str, Bytes], str]:
    """Return states as named bytes, and as JSON what :func:`decompress` has to know besides.

    Args:
        arrays: of a store, by graph input, see :class:`graphopt.inference.states.store.SavedStates`.
        layers: those of them that lie in pages.
        tokens: of each row, int64 [batch].
        loss: what may be lost.
        original: what the states were restored from; pages that stayed as they were are not compressed again.

    Raises:
        InputError: there is no such loss.
    """
    if loss not in get_args(Loss):
        raise InputError(f"the loss {loss!r}", remedy=f"give one of {', '.join(get_args(Loss))}")
    groups, content = code_groups(layers, tokens, loss), dict[str, Bytes]()
    in_groups = {name for group in groups for state in (*group.parts, "scales") for name in group.names(state)}
    for group in groups:
        same_groups = original.same_pages(group) if original is not None else set[int]()
        get = original.get if original is not None and same_groups else None
        for part in group.parts:
            _compress_codes(group, part, arrays, content, get, same_groups)
        for index, (rows, pages) in enumerate(group.pages()):
            if get is not None and index in same_groups:
                for kind in _kinds_of_scales(group):
                    content[f"{group.name}.{kind}.{index}"] = get(f"{group.name}.{kind}.{index}")
                continue
            scales = np.stack([arrays[name][rows, :, pages] for name in group.names("scales")], axis=1)
            for kind, numbers in _split_scales(group, scales).items():
                content[f"{group.name}.{kind}.{index}"] = _pack_scales(group, kind, numbers)
    types = {}
    for name, array in arrays.items():
        in_file = array
        if name not in in_groups:
            if loss != "none" and array.dtype == np.float32 and (np.abs(array) < np.finfo(np.float16).max).all():
                in_file = array.astype(np.float16)
            content[name] = pack_numbers(in_file)
        types[name] = [array.dtype.name, array.shape, in_file.dtype.name]
    return content, json.dumps({"arrays": types, "pages": to_json(layers), "loss": loss})


def decompress(
    get: Callable[[str], Bytes], description: str, tokens: IntArray, types: Mapping[str, np.dtype[Any]]
) -> dict[str, Array]:
    """Return states that :func:`compress` was given.

    Args:
        get: returns the bytes of a name.
        description: what :func:`compress` returned besides.
        tokens: of each row, int64 [batch].
        types: those that NumPy does not know by their names.

    Raises:
        ValueError, KeyError: they are not the bytes of such states.
    """
    facts = json.loads(description)
    shapes = {name: tuple(shape) for name, (_, shape, _) in facts["arrays"].items()}
    dtypes = {name: _type(dtype, types) for name, (dtype, _, _) in facts["arrays"].items()}
    file_types = {name: _type(dtype, types) for name, (_, _, dtype) in facts["arrays"].items()}
    groups = code_groups(from_json(facts["pages"]), tokens, facts["loss"])
    in_groups = {name for group in groups for state in (*group.parts, "scales") for name in group.names(state)}
    arrays = {name: np.zeros(shapes[name], dtypes[name]) for name in in_groups}
    for group in groups:
        for part in group.parts:
            _decompress_codes(group, part, get, arrays)
        for index, (rows, pages) in enumerate(group.pages()):
            _decompress_scales(group, index, get, [arrays[name] for name in group.names("scales")], rows, pages)
    for name in facts["arrays"]:
        if name not in in_groups:
            numbers = unpack_numbers(get(name), file_types[name], shapes[name])
            arrays[name] = numbers.astype(dtypes[name], copy=False)
    return {name: arrays[name] for name in facts["arrays"]}


def _type(name: str, types: Mapping[str, np.dtype[Any]]) -> np.dtype[Any]:
    return types[name] if name in types else np.dtype(name)


def _read_codes(group: CodeGroup, part: str, arrays: Mapping[str, Array], rows: Array, pages: Array) -> Bytes:
    """Return the symbols of pages, uint8 [T, n, L H D]: token by token, all channels of all layers and heads."""
    layer = group.first
    unpack = unpack_keys if part == "keys" else unpack_values
    sizes = (layer.attributes.page, layer.head_size, group.storage(part))
    divisor = group.divisor(part)
    # of shape n, L, H, T, D
    codes = np.stack([unpack(arrays[name][rows, :, pages], *sizes) for name in group.names(part)], axis=1)
    if divisor > 1:
        codes = (codes + np.uint8(divisor // 2)) // np.uint8(divisor)
    symbols = np.ascontiguousarray(np.moveaxis(codes, 3, 0))
    return symbols.reshape(*symbols.shape[:2], -1)


def _compress_codes(
    group: CodeGroup,
    part: str,
    arrays: Mapping[str, Array],
    content: dict[str, Bytes],
    get: Callable[[str], Bytes] | None,
    same_groups: set[int],
) -> None:
    name = f"{group.name}.{part}.classes"
    classes = content[name] = get(name) if get is not None else _classes(group, part, arrays)
    for index, (rows, pages) in enumerate(group.pages()):
        if get is not None and index in same_groups:
            content[f"{group.name}.{part}.{index}"] = get(f"{group.name}.{part}.{index}")
            continue
        writer, before, of_channels = SymbolWriter(group.contexts(part)), None, np.tile(classes, len(rows))
        for token in _read_codes(group, part, arrays, rows, pages):
            writer.write(token.ravel(), _contexts(group, part, before, of_channels))
            before = token.ravel()
        content[f"{group.name}.{part}.{index}"] = writer.bytes()


def _decompress_codes(group: CodeGroup, part: str, get: Callable[[str], Bytes], arrays: Mapping[str, Array]) -> None:
    layer, kv = group.first, group.first.attributes
    pack = pack_keys if part == "keys" else pack_values
    classes = get(f"{group.name}.{part}.classes")
    channels, contexts = len(group.layers) * kv.kv_heads * layer.head_size, group.contexts(part)
    codes_before = _NO_CODE + 1 if part == "keys" else 1
    if len(classes) != channels or int(classes.max(initial=0)) * codes_before >= contexts:
        raise ValueError(f"{group.name}.{part}.classes names {len(classes)} channels of {channels}")
    for index, (rows, pages) in enumerate(group.pages()):
        reader = SymbolReader(get(f"{group.name}.{part}.{index}"), contexts)
        symbols = np.empty((kv.page, len(rows), channels), np.uint8)
        before, of_channels = None, np.tile(classes, len(rows))
        for token in symbols:
            before = reader.next_symbols(_contexts(group, part, before, of_channels))
            token[:] = before.reshape(token.shape)
        codes = symbols * np.uint8(group.divisor(part))
        codes = np.moveaxis(codes.reshape(kv.page, len(rows), len(group.layers), kv.kv_heads, -1), 0, 3)
        for number, name in enumerate(group.names(part)):
            arrays[name][rows, :, pages] = pack(codes[:, number], group.storage(part))


def _classes(group: CodeGroup, part: str, arrays: Mapping[str, Array]) -> Bytes:
    """Return the class of each channel, uint8 [L H D].

    The pages that are read together in the middle of the text stand for all.
    """
    channels, groups = len(group.layers) * group.first.attributes.kv_heads * group.first.head_size, list(group.pages())
    if not groups or not group.has_classes(part):
        return np.zeros(channels, np.uint8)
    symbols = _read_codes(group, part, arrays, *groups[len(groups) // 2]).astype(np.float32)
    later, earlier = (codes.reshape(-1, channels) for codes in (symbols[1:], symbols[:-1]))
    mean, mean_before = (codes.mean(axis=0) for codes in (later, earlier))
    square, product = (np.einsum("nc,nc->c", later, codes) / np.float32(len(later)) for codes in (later, earlier))
    variance = square - mean * mean
    if part == "values":
        numbers, (means, parts) = variance, _VALUE_CLASSES
    else:
        numbers, (means, parts) = (product - mean * mean_before) / np.maximum(variance, 1e-6), _KEY_CLASSES
    return (_quantile(mean, means) * parts + _quantile(numbers, parts)).astype(np.uint8)


def _quantile(numbers: Array, parts: int) -> Array:
    """Return in which of so many equal parts of the numbers each one is."""
    return np.searchsorted(np.quantile(numbers, np.arange(1, parts) / parts), numbers)


def _contexts(group: CodeGroup, part: str, before: Bytes | None, of_channels: Bytes) -> Bytes:
    """Return the contexts of one token of pages, uint8 [n L H D], of channels of classes and behind codes before."""
    if part == "values":
        return of_channels
    shift = np.uint8(max(0, (group.symbols(part) - 1).bit_length() - _CONTEXT_BITS))
    code = np.uint8(_NO_CODE) if before is None else before >> shift
    contexts: Bytes = code + of_channels * np.uint8(_NO_CODE + 1)
    return contexts


def _split_scales(group: CodeGroup, scales: Halves) -> dict[str, Halves]:
    """Return the scales of pages, [n, L, H, ...], by what they are of: lows and steps [..., 2, m], factors [..., m]."""
    size, kv = group.first.head_size, group.first.attributes
    kinds = {"key_scales": scales[..., : 2 * size].reshape(*scales.shape[:-1], 2, size)}
    of_tokens = scales[..., 2 * size :]
    if kv.parts > 1:
        kinds["value_scales"] = of_tokens[..., : 2 * kv.page].reshape(*scales.shape[:-1], 2, kv.page)
    if kv.token_factors:
        kinds["key_factors"] = of_tokens[..., -kv.page :]
    return kinds


def _kinds_of_scales(group: CodeGroup) -> tuple[str, ...]:
    return tuple(
        _split_scales(group, np.empty(group.first.attributes.scale_numbers(group.first.head_size), np.float16))
    )


def _decompress_scales(
    group: CodeGroup, index: int, get: Callable[[str], Bytes], arrays: list[Array], rows: Array, pages: Array
) -> None:
    scales = np.empty((len(rows), len(arrays), *arrays[0].shape[1:2], *arrays[0].shape[3:]), np.float16)
    # views of the same memory
    for kind, numbers in _split_scales(group, scales).items():
        numbers[...] = _unpack_scales(group, kind, get(f"{group.name}.{kind}.{index}"), numbers.shape)
    for number, array in enumerate(arrays):
        array[rows, :, pages] = scales[:, number]


def _pack_scales(group: CodeGroup, kind: str, numbers: Halves) -> Bytes:
    """Return scales as bytes, the first of which says how: as they are, or rounded; factors stay as they are."""
    if kind == "key_factors":
        parts, floats = None, [numbers]
    else:
        parts = None if group.loss == "none" else _round_scales(group, kind, numbers)
        floats = [numbers[..., 0, :], numbers[..., 1, :]]  # the bytes of lows and steps have other frequencies
    is_rounded = parts is not None
    content = join([pack_numbers(part) for part in parts or floats])
    return np.concatenate([np.array([is_rounded], np.uint8), content])


def _unpack_scales(group: CodeGroup, kind: str, content: Bytes, shape: tuple[int, ...]) -> Array:
    is_rounded, content = bool(content[0]), content[1:]
    if kind == "key_factors":
        return unpack_numbers(split(content, 1)[0], np.dtype(np.float16), shape)
    half, dtype = (*shape[:-2], shape[-1]), np.dtype(np.uint16 if is_rounded else np.float16)
    first, second = (unpack_numbers(part, dtype, half) for part in split(content, 2))
    if not is_rounded:
        return np.stack([first, second], axis=-2)
    exponents, middles = _sum_deltas(kind, _from_zigzag(first), _from_zigzag(second))
    step = np.exp2(exponents / _OCTAVE)
    low = step * (middles / _STEP - _levels_of_scales(group, kind) / 2)
    return np.stack([low, step], axis=-2).clip(-LARGEST_SCALE, LARGEST_SCALE).astype(np.float16)


def _round_scales(group: CodeGroup, kind: str, numbers: Halves) -> list[Array] | None:
    """Return steps and middles as zigzag numbers, uint16; ``None`` where a set is flat, not finite, or far from 0."""
    low, step = np.moveaxis(numbers, -2, 0).astype(np.float64)
    if not (np.isfinite(low).all() and (step > 0).all() and np.isfinite(step).all()):
        return None
    exponents = np.rint(np.log2(step) * _OCTAVE)
    levels = _levels_of_scales(group, kind)
    middles = np.rint((low + step * levels / 2) / np.exp2(exponents / _OCTAVE) * _STEP)
    if np.abs(middles).max() > np.iinfo(np.int16).max // 2:
        return None
    # the scales of a channel are near those of the page before, the steps of values near those of the token before
    axis = 0 if kind == "key_scales" else -1
    exponents = np.diff(exponents, axis=axis, prepend=0)
    if kind == "key_scales":
        middles = np.diff(middles, axis=axis, prepend=0)
    return [_to_zigzag(exponents.astype(np.int32)), _to_zigzag(middles.astype(np.int32))]


def _levels_of_scales(group: CodeGroup, kind: str) -> int:
    return group.levels("keys" if kind == "key_scales" else "values")


def _sum_deltas(kind: str, exponents: Array, middles: Array) -> tuple[Array, Array]:
    if kind == "key_scales":
        return exponents.cumsum(axis=0), middles.cumsum(axis=0)
    return exponents.cumsum(axis=-1), middles


def _to_zigzag(numbers: npt.NDArray[np.int32]) -> npt.NDArray[np.uint16]:
    """Return 0, -1, 1, -2 ... as 0, 1, 2, 3 ...: numbers near 0, of either sign, have an upper byte of 0."""
    return (numbers << 1 ^ numbers >> 31).astype(np.uint16)


def _from_zigzag(numbers: npt.NDArray[np.uint16]) -> npt.NDArray[np.float64]:
    wide = numbers.astype(np.int32)
    return (wide >> 1 ^ -(wide & 1)).astype(np.float64)
