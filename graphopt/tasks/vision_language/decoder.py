"""The last graph of a vision-language model: a causal language model that reads embeddings in the place of tokens.

Ports are those of :class:`graphopt.tasks.causal_lm.interface.Interface`, with ``inputs_embeds``.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from graphopt.analysis.structure.ports import (
    ATTENTION_MASK,
    FEATURE_INDEX,
    FEATURE_WEIGHT,
    IMAGE_FEATURES,
    IMAGE_GRID,
    INPUT_IDS,
    INPUTS_EMBEDS,
    LOGITS,
    PIXEL_VALUES,
    POSITION_IDS,
    TOKEN_TYPE_IDS,
)
from graphopt.errors import InputError
from graphopt.tasks.base import BATCH, PADDING, Call, classes_of, upper
from graphopt.tasks.causal_lm import CausalLM
from graphopt.tasks.causal_lm.interface import Interface
from graphopt.tasks.causal_lm.probe import CausalProbe
from graphopt.tasks.encoder import vocabulary_of
from graphopt.tasks.image_inputs import (
    MASK,
    SIZES,
    images_of_class,
    images_of_model,
    stacked_features_of,
    two_sided_part,
)
from graphopt.tasks.vision_language.embedding import TOKEN_EMBEDDING, image_token_of
from graphopt.tasks.vision_language.patches import numbers_of
from graphopt.tasks.vision_language.positions import positions_of_images
from graphopt.tasks.vision_language.tiles import Tiling, arrange_all
from graphopt.tasks.vision_language.vision import VISION_TOWER

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping
    from pathlib import Path

    import onnx_ir as ir

    from graphopt.tasks.base import RunPart
    from graphopt.tasks.ports import Array, IntArray

_TEXT = 6
"""Tokens of text around the image of a probe."""

_MARKS, _MARK_COUNT = "marks", 3
"""What a probe calls marks of tokens, and how many tokens of its last row are marked where there is no image."""


@dataclass(frozen=True)
class VisionLanguageProbe(CausalProbe):
    """Random embeddings, or those of tokens and images.

    Attributes:
        embeddings: float [batch, length, width].
        image_positions: int64 [3, batch, length], where images are among the tokens and a position has three axes.
        framework: what the framework that the model comes from is fed in place of tokens alone.
    """

    embeddings: Array = dataclasses.field(default_factory=lambda: np.zeros((0, 0, 0)))
    image_positions: IntArray | None = None
    framework: Mapping[str, Array] = dataclasses.field(default_factory=dict)

    @property
    def feeds(self) -> dict[str, Array]:
        """See :class:`CausalProbe`; positions are left to the framework."""
        return {INPUT_IDS: self.input_ids, ATTENTION_MASK: self.attention_mask, **self.framework}

    def other_feeds(self, rows: slice, columns: slice) -> dict[str, Array]:
        """See :class:`CausalProbe`."""
        feeds: dict[str, Array] = {INPUTS_EMBEDS: np.ascontiguousarray(self.embeddings[rows, columns])}
        if self.image_positions is not None:
            feeds[POSITION_IDS] = np.ascontiguousarray(self.image_positions[:, rows, columns])
        return feeds


class VisionLanguage(CausalLM):
    """See the module for the ports."""

    name: ClassVar[str] = "vision_language"
    noun: ClassVar[str] = "a vision-language model"
    auto_class: ClassVar[str] = "AutoModelForImageTextToText"
    parts: ClassVar[Mapping[str, str]] = {"vision": VISION_TOWER.name, "embedding": TOKEN_EMBEDDING.name}
    takes: ClassVar[tuple[str, ...]] = ("texts", "images")
    unrolls: ClassVar[bool] = False
    files: ClassVar[tuple[str, ...]] = ("chat_template.json", "video_preprocessor_config.json")

    def matches(self, inputs: Collection[str], outputs: Collection[str]) -> bool:
        """See :class:`graphopt.tasks.base.Task`."""
        return INPUTS_EMBEDS in inputs and LOGITS in outputs

    def probe(self, graph: ir.Graph, *, context: int = 0) -> VisionLanguageProbe:
        """Draw a probe with random embeddings, as small as those of tokens are."""
        interface = Interface.of_graph(graph)
        probe = CausalProbe.draw(interface, context=context)
        width = _width(interface)
        numbers = np.random.default_rng(1).standard_normal((*probe.input_ids.shape, width)) / np.sqrt(width)
        embeddings = numbers.astype(interface.inputs[INPUTS_EMBEDS].dtype or np.float32)
        if has_marks(graph):
            embeddings[..., -1] = 0
            embeddings[1:, context + 1 : context + 1 + _MARK_COUNT, -1] = 1
        return VisionLanguageProbe(**vars(probe), embeddings=embeddings)

    def probe_behind(
        self, graph: ir.Graph, parts: Mapping[str, ir.Graph], run: RunPart, config: Any = None
    ) -> VisionLanguageProbe:
        """Draw a probe of a text with an image in each row."""
        ids, mask, feeds, sizes = _prompts(parts, run, config)
        features = feeds.pop(IMAGE_FEATURES)
        interface, positions = Interface.of_graph(graph), None
        embeddings: list[Array] = []
        for start, end, _ in CausalProbe(ids, mask).calls:
            # All images lie in the first call.
            rows = features[len(features) * (start > 0) :]
            text = TOKEN_EMBEDDING.feeds_of(parts["embedding"], ids[:, start:end], rows)
            embeddings.append(run("embedding", text)[INPUTS_EMBEDS])
        if has_marks(graph):
            feeds[_MARKS] = np.concatenate(embeddings, axis=1)[..., -1].astype(np.int64)
        if len(interface.inputs[POSITION_IDS].shape if POSITION_IDS in interface.inputs else ()) == 3:
            positions = np.zeros((3, *ids.shape), np.int64)
            is_image = ids == image_token_of(parts["embedding"])
            for row, size in enumerate(sizes):
                real = mask[row] == 1
                positions[:, row, real] = positions_of_images(is_image[row, real], [size])
            feeds["mm_token_type_ids"] = is_image.astype(np.int32)
        has_positions = POSITION_IDS in interface.inputs
        all_embeddings = np.concatenate(embeddings, axis=1)
        return VisionLanguageProbe(
            ids, mask, 0, has_positions, embeddings=all_embeddings, image_positions=positions, framework=feeds
        )

    def calls(self, graph: ir.Graph, sizes: Iterable[tuple[int, int, int]]) -> Iterator[Call]:
        """See :class:`graphopt.tasks.base.Task`; embeddings are of one number where no mask can depend on more.

        Else all tokens but the first are marked: the mask is neither causal, nor one that shows everything.
        """
        interface, is_marked = Interface.of_graph(graph), has_marks(graph)
        width, dtype = _width(interface) if is_marked else 1, interface.inputs[INPUTS_EMBEDS].dtype
        sizes = list(sizes)
        for call, (batch, length, _) in zip(super().calls(graph, sizes), sizes, strict=True):
            embeddings = np.zeros((batch, length, width), dtype)
            embeddings[:, 1:, -1] = is_marked
            yield dataclasses.replace(call, feeds={**call.feeds, INPUTS_EMBEDS: embeddings})

    def takes_config(self, config: Any, transformers: Any) -> bool:
        """Take models of images and texts whose images become rows of features, which take the places of tokens."""
        return images_of_class(self._named_class(config, transformers)) is not None

    def class_of(self, config: Any, transformers: Any) -> Any:
        """Return the class that the configuration names."""
        return self._named_class(config, transformers)

    def _named_class(self, config: Any, transformers: Any) -> Any:
        candidates = classes_of(type(config), transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
        names = candidates.intersection(getattr(config, "architectures", None) or ())
        return getattr(transformers, min(names), None) if names else None

    def export_parts(self, model: Any, source: str) -> tuple[Any, dict[str, Any]]:
        """Return the model as it runs behind a past, with embeddings of several new tokens.

        Raises:
            InputError: a state of the model is neither a key-value cache nor a recurrent state.
        """
        torch = importlib.import_module("torch")
        transformers = importlib.import_module("transformers")
        decompose = importlib.import_module("transformers.exporters.utils").decompose_prefill_decode
        model.generation_config = transformers.GenerationConfig(do_sample=False, use_cache=True, pad_token_id=0)
        module, inputs = decompose(model, self.sample(model), multi_token_decode=True)["decode"]
        with torch.no_grad():
            embeddings = model.get_input_embeddings()(inputs.pop(INPUT_IDS))
        inner_width = embeddings.shape[-1] * stacked_features_of(model.config)
        if inner_width:
            embeddings = torch.nn.functional.pad(embeddings, (0, inner_width))
            upper("graphopt.models.vision_part:read_stacked_features")(model)
        if two_sided_part(type(model)):
            embeddings = torch.nn.functional.pad(embeddings, (0, 1))
            upper("graphopt.models.vision_part:read_marks")(model)
        names = {*inspect.signature(model.forward).parameters, "use_cache"}
        feeds = {name: value for name, value in inputs.items() if name in names and value is not None}
        feeds = {INPUTS_EMBEDS: embeddings, **feeds}
        if POSITION_IDS in feeds and feeds[POSITION_IDS].dim() == 3:
            # In front of the three axes stand positions of text, which tell packed texts apart.
            feeds[POSITION_IDS] = feeds[POSITION_IDS][-3:]
        upper("graphopt.models.states:confirm_caches")(feeds, source)
        return module, feeds

    def framework_inputs(self, model: Any, feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        """See :class:`graphopt.tasks.base.Task`; tiles that may have a mask come as [batch, tiles, ...].

        Marks come as types of tokens: 1 for one of an image, or 0 for one of the prompt.
        """
        if _MARKS in feeds:
            marks = feeds[_MARKS] if two_sided_part(type(model)) == "image" else 1 - feeds[_MARKS]
            feeds = {name: array for name, array in feeds.items() if name != _MARKS} | {TOKEN_TYPE_IDS: marks}
        form = images_of_model(model)
        if IMAGE_GRID in feeds:
            text_feeds = {name: array for name, array in feeds.items() if name not in (PIXEL_VALUES, IMAGE_GRID)}
            channels = getattr(model.config.vision_config, "num_channels", 3)
            return text_feeds | numbers_of(feeds[PIXEL_VALUES], np.asarray(feeds[IMAGE_GRID], np.int64), channels, form)
        return {**feeds, PIXEL_VALUES: feeds[PIXEL_VALUES][:, None]} if MASK in form else feeds

    def facts(self, folder: Path) -> Any:
        """See :class:`graphopt.tasks.base.Task`; which token stands for an image, too."""
        return upper("graphopt.artifact.hf_config:facts_of_vision_language")(folder)


def has_marks(graph: ir.Graph) -> bool:
    """Return whether a decoder cuts a mark off each embedding, see :mod:`graphopt.tasks.vision_language.embedding`."""
    embeddings = next(value for value in graph.inputs if value.name == INPUTS_EMBEDS)
    parts = [part for node in embeddings.consumers() if node.op_type in ("Slice", "Split") for part in node.outputs]
    return any(part.shape is not None and part.shape[-1] == 1 for part in parts)


def _width(interface: Interface) -> int:
    port = interface.inputs[INPUTS_EMBEDS]
    width = port.shape[-1] if port.shape else None
    if width is None:
        raise InputError("the graph does not say how wide an embedding is", tensor=INPUTS_EMBEDS)
    return width


def _prompts(
    parts: Mapping[str, ir.Graph], run: RunPart, config: Any
) -> tuple[IntArray, IntArray, dict[str, Array], list[tuple[int, int, int]]]:
    """Return tokens and mask of a prompt with an image in each row, what is fed beside them, and sizes in tokens.

    The first row begins with padding. What is fed has ``image_features`` too.
    """
    vision, random = parts["vision"], np.random.default_rng(0)
    probe = VISION_TOWER.probe(vision)
    images = dict(probe.feeds)
    if IMAGE_GRID in images:
        # One image a call; the second is the first one turned.
        calls = [images, {**images, PIXEL_VALUES: images[PIXEL_VALUES][::-1].copy(), IMAGE_GRID: _swap_sides(images)}]
        features = [run("vision", call)[IMAGE_FEATURES] for call in calls]
        images = {name: np.concatenate([call[name] for call in calls]) for name in images}
    elif FEATURE_INDEX in images:
        images, features = _tile_images(images[PIXEL_VALUES], Tiling.of_config(config), run)
    else:
        features = np.split(run("vision", images)[IMAGE_FEATURES], len(images[PIXEL_VALUES]))
    counts = [len(rows) for rows in features]
    patch_count = len(images[PIXEL_VALUES]) // sum(counts) if IMAGE_GRID in images else 1
    side = round(np.sqrt(patch_count))
    sizes = [(int(t), int(h) // side, int(w) // side) for t, h, w in images.get(IMAGE_GRID, np.zeros((0, 3), int))]
    image_token = image_token_of(parts["embedding"]) or 0
    vocabulary = vocabulary_of(parts["embedding"]) or 2
    length = PADDING + max(counts) + _TEXT
    ids = random.integers(0, vocabulary, (BATCH, length))
    ids[ids == image_token] = 0 if image_token else 1
    mask = np.ones_like(ids)
    for row, count in enumerate(counts):
        first = PADDING * (row == 0)
        mask[row, :first] = 0
        ids[row, first + 2 : first + 2 + count] = image_token
    return ids, mask, {**images, IMAGE_FEATURES: np.concatenate(features)}, sizes


def _tile_images(tiles: Array, tiling: Tiling, run: RunPart) -> tuple[dict[str, Array], list[Array]]:
    """Return two images of tiles with their sizes as transformers reads them, and the features of each.

    Args:
        tiles: random ones, [tiles, channels, height, width].
        tiling: how images become tiles.
        run: runs the tower.
    """
    # A wide and a high image, neither of which fills its tiles.
    sizes = [(tiling.tile, 2 * tiling.tile - 1), (2 * tiling.tile - 1, tiling.tile)]
    counts = [tiling.tiles(size) for size in sizes]
    index, weight, lengths = arrange_all(tiling, sizes)
    pixels = np.stack([np.roll(tiles[n % len(tiles)], n, axis=-1) for n in range(sum(counts))])
    vision_feeds = {PIXEL_VALUES: pixels, FEATURE_INDEX: index, FEATURE_WEIGHT: weight}
    features = np.split(run("vision", vision_feeds)[IMAGE_FEATURES], np.cumsum(lengths)[:-1])
    images = np.zeros((len(sizes), max(counts), *pixels.shape[1:]), pixels.dtype)
    for image, part in zip(images, np.split(pixels, np.cumsum(counts)[:-1]), strict=True):
        image[: len(part)] = part
    return {PIXEL_VALUES: images, SIZES: np.array(sizes)}, features


def _swap_sides(images: Mapping[str, Array]) -> Array:
    grid = images[IMAGE_GRID]
    return np.ascontiguousarray(grid[:, [0, 2, 1]])


VISION_LANGUAGE = VisionLanguage()
