"""A vision-language model, opened in onnxruntime: images and a prompt in, a text out.

The processor of the checkpoint makes numbers of images, and writes as many image tokens into the prompt as they have
features. The vision tower runs once for a prompt, and the features lie ready until their tokens are fed.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from graphopt.analysis.structure.ports import (
    FEATURE_INDEX,
    FEATURE_WEIGHT,
    IMAGE_FEATURES,
    IMAGE_GRID,
    INPUT_IDS,
    INPUTS_EMBEDS,
    PIXEL_VALUES,
    POSITION_IDS,
)
from graphopt.errors import InputError
from graphopt.inference.conversation.template import ChatTemplate
from graphopt.inference.decoding.continuation import start
from graphopt.inference.decoding.decoder import Decoder
from graphopt.inference.generation import Completion, room_for, run
from graphopt.inference.session import OpenModel, Session, open_folder, session_from
from graphopt.inference.signals import image_processor
from graphopt.ort.session import run as run_session
from graphopt.tasks import TASKS
from graphopt.tasks.image_inputs import MASK, SIZES
from graphopt.tasks.ports import port_of_node
from graphopt.tasks.vision_language import VISION_LANGUAGE
from graphopt.tasks.vision_language.patches import patches_of
from graphopt.tasks.vision_language.positions import positions_of_images
from graphopt.tasks.vision_language.tiles import Tiling, arrange_all

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from graphopt.inference.decoding.batch_rows import Step as RowStep
    from graphopt.inference.decoding.continuation import Continuation, Settings
    from graphopt.inference.generation import Step
    from graphopt.inference.states.store import StateStore
    from graphopt.tasks.ports import Array, IntArray
    from graphopt.util.targets import Device

_VISION = "vision"
_COUNTS = "batch_num_images"


@dataclass(frozen=True)
class ImagePrompt:
    """A prompt with images, as the decoder takes it.

    Attributes:
        tokens: with as many image tokens as there are features.
        features: of the images in order, [image tokens, width].
        positions: of the tokens, int64 [3, length], where a position has three axes.
    """

    tokens: list[int]
    features: Array
    positions: IntArray | None = None

    @property
    def shift(self) -> int:
        """How far the positions behind the prompt are from those of as many tokens of text."""
        return 0 if self.positions is None else int(self.positions.max()) + 1 - len(self.tokens)


@dataclass(frozen=True)
class VisionLanguageSession:
    """A vision-language model that is ready to run.

    Attributes:
        vision: the graph that makes features of images.
        decoder: the graph that makes texts, with the embedding of tokens in front.
    """

    vision: OpenModel
    decoder: Session

    @property
    def folder(self) -> Path:
        """The artifact."""
        return self.decoder.file.parent

    @property
    def image_token(self) -> int:
        """The token whose places features of images take.

        Raises:
            InputError: the configuration does not say.
        """
        token = self.decoder.manifest.model.image_token_id
        if token is None:
            raise InputError(
                "the configuration does not say which token stands for an image",
                file=self.folder,
                remedy="set image_token_id in its config.json, and export it again",
            )
        return token

    @cached_property
    def processor(self) -> Any:
        """The processor of the checkpoint, as transformers has it.

        Raises:
            InputError: it cannot be loaded.
            MissingDependencyError: transformers or Pillow is not installed.
        """
        return processor_of(self.folder)

    def prompt(self, text: str, images: Sequence[Any]) -> ImagePrompt:
        """Return a prompt with images.

        Args:
            text: with a placeholder for each image, as the model's maker writes it (``<image>``). Without one it is put
                into the chat template of the checkpoint, as a question about the images; where there is no template,
                placeholders are put in front.
            images: images of Pillow.

        Raises:
            InputError: there is no image, placeholders and images differ in number, the processor refuses them, or the
                run fails.
            MissingDependencyError: transformers, Pillow, or jinja2 for a chat template, is not installed.
        """
        if not images:
            raise InputError("there is no image", remedy="give one, or complete the text alone")
        numbers = self._process(self.with_placeholders(text, len(images)), images)
        return self.prompt_of_numbers(numbers[INPUT_IDS][0], numbers)

    def prompt_of_numbers(self, tokens: IntArray, numbers: Mapping[str, Array]) -> ImagePrompt:
        """Return a prompt of what a processor made.

        Args:
            tokens: [length], with as many image tokens as the images have features.
            numbers: ``pixel_values``, and ``image_grid_thw`` of patches.

        Raises:
            InputError: image tokens and features differ in number, or the run fails.
        """
        ids, features, sizes = np.asarray(tokens, np.int64), *self.features_of(numbers)
        is_image = ids == self.image_token
        if int(is_image.sum()) != len(features):
            raise InputError(
                f"the prompt has {int(is_image.sum())} image tokens, and the images have {len(features)} features",
                file=self.folder,
                remedy="are processor and tokenizer those of this model, and is there one placeholder for each image?",
            )
        port = self.decoder.interface.inputs.get(POSITION_IDS)
        has_axes = port is not None and len(port.shape) == 3
        return ImagePrompt(ids.tolist(), features, positions_of_images(is_image, sizes) if has_axes else None)

    def features_of(self, numbers: Mapping[str, Array]) -> tuple[Array, list[tuple[int, int, int]]]:
        """Return the features of images [image tokens, width], and sizes in tokens of those that are patches.

        Args:
            numbers: what a processor made: ``pixel_values`` [..., tiles, channels, height, width], with
                ``image_sizes`` [images, 2] where features of tiles are put in order by these; or what
                :func:`graphopt.tasks.vision_language.patches.patches_of` reads.

        Raises:
            InputError: they have another shape than the graph takes, a mask hides a part of a tile, or the run fails.
        """
        pixels, ports = numbers[PIXEL_VALUES], {node.name: node for node in self.vision.inference.get_inputs()}
        if FEATURE_INDEX in ports:
            return self._features_of_tiles(numbers), []
        if IMAGE_GRID not in ports:
            mask = numbers.get(MASK)
            if mask is not None and not np.asarray(mask).all():
                raise InputError(
                    "the processor hides a part of an image, and the vision tower takes whole tiles",
                    file=self.folder,
                    tensor=MASK,
                    remedy="let the processor resize images, as the checkpoint does by default",
                )
            return self._run_vision({PIXEL_VALUES: pixels.reshape(-1, *pixels.shape[-3:])}), []
        parts, grids = patches_of(numbers, int(port_of_node(ports[PIXEL_VALUES]).shape[1] or 0))
        features = [
            self._run_vision({PIXEL_VALUES: part, IMAGE_GRID: grid[None]})
            for part, grid in zip(parts, grids, strict=True)
        ]
        sizes = [
            _tokens_of(grid, len(part) // len(rows)) for part, rows, grid in zip(parts, features, grids, strict=True)
        ]
        return np.concatenate(features), sizes

    def _features_of_tiles(self, numbers: Mapping[str, Array]) -> Array:
        """Return the features of images that were cut into tiles, see :class:`Tiling`."""
        sizes = np.asarray(numbers[SIZES]).reshape(-1, 2)
        # transformers cuts an image only where a prompt has no other.
        prompts = np.asarray(numbers.get(_COUNTS, np.ones(len(sizes), int))).reshape(-1)
        is_cut = [count == 1 for count in prompts.tolist() for _ in range(count)]
        cut_sizes = [size if cut else None for size, cut in zip(sizes.tolist(), is_cut, strict=True)]
        index, weight, _ = arrange_all(self._tiling, cut_sizes)
        tiles = [
            image[: 1 if size is None else self._tiling.tiles(size)]
            for image, size in zip(numbers[PIXEL_VALUES], cut_sizes, strict=True)
        ]
        return self._run_vision({PIXEL_VALUES: np.concatenate(tiles), FEATURE_INDEX: index, FEATURE_WEIGHT: weight})

    @cached_property
    def _tiling(self) -> Tiling:
        transformers = importlib.import_module("transformers")
        return Tiling.of_config(transformers.AutoConfig.from_pretrained(self.folder, trust_remote_code=False))

    def with_placeholders(self, text: str, count: int) -> str:
        """Return a prompt with a placeholder for each of ``count`` images, see :meth:`prompt`."""
        placeholder = str(getattr(self.processor, "image_token", "") or self._name_of_image_token())
        mark = getattr(self.processor, "boi_token", None) or placeholder
        if placeholder in text or mark in text:
            return text
        try:
            template = ChatTemplate.of_folder(self.folder)
        except InputError:
            return mark * count + text
        content = [*({"type": "image"} for _ in range(count)), {"type": "text", "text": text}]
        return template.render([{"role": "user", "content": content}])

    def _name_of_image_token(self) -> str:
        return str(self.decoder.require_tokenizer().id_to_token(self.image_token))

    def _process(self, text: str, images: Sequence[Any]) -> dict[str, Array]:
        try:
            numbers = self.processor(text=[text], images=list(images), return_tensors="np")
        except Exception as error:  # processors raise anything
            raise InputError(
                f"the processor refuses the prompt and its images: {str(error).splitlines()[0]}",
                file=self.folder,
                remedy="write one placeholder for each image, or none",
            ) from error
        return {name: np.asarray(array) for name, array in numbers.items()}

    def _run_vision(self, feeds: Mapping[str, Array]) -> Array:
        ports = {port.name: port for port in map(port_of_node, self.vision.inference.get_inputs())}
        shape, sizes = ports[PIXEL_VALUES].shape[1:], feeds[PIXEL_VALUES].shape[1:]
        if len(shape) != len(sizes) or any(a not in (None, b) for a, b in zip(shape, sizes, strict=True)):
            raise InputError(
                f"an image comes as {list(sizes)} numbers, and the vision tower takes {list(shape)}",
                file=self.vision.file,
                remedy="make it with the processor of this model",
            )
        arrays = {name: np.ascontiguousarray(array, ports[name].dtype) for name, array in feeds.items()}
        try:
            return run_session(self.vision.inference, [IMAGE_FEATURES], arrays)[0]
        except Exception as error:
            raise InputError(f"onnxruntime cannot run the model: {error}", file=self.vision.file) from error


def _tokens_of(grid: IntArray, patch_count: int) -> tuple[int, int, int]:
    """Return how many tokens an image has in time, height and width, where each is made of ``patch_count`` patches."""
    side = round(float(np.sqrt(patch_count)))
    time, height, width = grid.tolist()
    return time, height // side, width // side


def processor_of(folder: Path) -> Any:
    """Return the processor of a checkpoint, on Pillow and NumPy; what reads videos and sound is left out.

    Raises:
        InputError: it cannot be loaded.
        MissingDependencyError: transformers or Pillow is not installed.
    """
    parts: dict[str, Any] = {"image_processor": image_processor(folder)}
    transformers = importlib.import_module("transformers")
    try:
        parts["tokenizer"] = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        processor_class = images_only(_processor_class(config))
        settings, _ = processor_class.get_processor_dict(folder)
        arguments = [parts.get(name) for name in processor_class.get_attributes()]
        return processor_class.from_args_and_dict(arguments, settings)
    except Exception as error:
        raise InputError(
            f"transformers cannot load the processor of images and texts: {str(error).splitlines()[0]}",
            file=folder,
            remedy="are the processor_config.json and the tokenizer of the checkpoint there, and whole?",
        ) from error


def _processor_class(config: Any) -> Any:
    """Return the class of processors of a configuration, also where transformers wants torchvision for it.

    Pixtral's uses none of it: it imports how sizes are computed from a module that has torchvision's processor too.
    """
    auto = importlib.import_module("transformers.models.auto.processing_auto")
    named_class = auto.PROCESSOR_MAPPING[type(config)]
    if not isinstance(named_class, importlib.import_module("transformers.utils.import_utils").DummyObject):
        return named_class
    package = named_class.__module__.rpartition(".")[0]
    family = package.rpartition(".")[2]
    name, pillow_name = (f"{package}.{kind}_{family}" for kind in ("image_processing", "image_processing_pil"))
    before = sys.modules.get(name)
    sys.modules[name] = importlib.import_module(pillow_name)
    try:
        return getattr(importlib.import_module(named_class.__module__), auto.PROCESSOR_MAPPING_NAMES[config.model_type])
    finally:
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before


def images_only(processor_class: Any) -> Any:
    """Return a class of processors whose parts may be absent: what reads videos needs torchvision."""

    def check(self: Any, name: str, part: Any) -> Any:
        return None if part is None else processor_class.check_argument_for_proper_class(self, name, part)

    return type(processor_class.__name__, (processor_class,), {"check_argument_for_proper_class": check})


class ImageDecoder(Decoder):
    """A decoder of prompts with images.

    Args:
        session: the model.
        prompts: of the rows.
        image_token: the token whose places features take.
        states: as for :class:`Decoder`.
        room: see there.
    """

    def __init__(
        self,
        session: Session,
        prompts: Sequence[ImagePrompt],
        image_token: int,
        *,
        states: StateStore | None = None,
        room: int = 0,
    ) -> None:
        super().__init__(session, len(prompts), states=states, room=room)
        self._prompts, self._image_token = list(prompts), image_token

    def row(self, row: int) -> Decoder:
        """See :class:`Decoder`."""
        return ImageDecoder(self.session, [self._prompts[row]], self._image_token, states=self.states.row(row))

    def _ends(self, input_ids: IntArray, piece: int) -> list[int]:
        """See :class:`Decoder`; where tokens see others behind them, no block of these is cut."""
        ends = super()._ends(input_ids, piece)
        embedding = self.session.require_embedding()
        if len(ends) == 1 or not embedding.has_marks:
            return ends
        features = np.concatenate([prompt.features for prompt in self._prompts])
        is_marked = np.asarray(embedding.embed(input_ids, features)[..., -1], np.float32) > 0
        is_inside = (is_marked[:, 1:] & is_marked[:, :-1]).any(axis=0)
        borders = np.append(np.flatnonzero(~is_inside) + 1, input_ids.shape[1])
        return sorted({int(borders[np.searchsorted(borders, end)]) for end in ends})

    def _inputs(self, step: RowStep, input_ids: IntArray, mask: IntArray | None) -> dict[str, Array]:
        embedding = self.session.require_embedding()
        real = np.ones(input_ids.shape, bool) if mask is None else mask.astype(bool)
        features = []
        for prompt, ids, columns, past in zip(self._prompts, input_ids, real, step.past.tolist(), strict=True):
            # A text may name the token too, behind its prompt: then it is a token like others.
            new = np.flatnonzero(columns)[: max(0, len(prompt.tokens) - past)]
            first = prompt.tokens[:past].count(self._image_token)
            features.append(prompt.features[first : first + int((ids[new] == self._image_token).sum())])
        inputs: dict[str, Array] = {**step.feeds, INPUTS_EMBEDS: embedding.embed(input_ids, np.concatenate(features))}
        if self._prompts[0].positions is not None:
            inputs[POSITION_IDS] = self._positions(step.feeds[POSITION_IDS])
        return inputs

    def _positions(self, text_positions: Array) -> Array:
        """Return positions [3, batch, length] of tokens, from those that they have as text, alike."""
        positions = np.array(text_positions, np.int64)
        for row, prompt in enumerate(self._prompts):
            assert prompt.positions is not None
            position, count = positions[0, row].copy(), len(prompt.tokens)
            in_prompt = prompt.positions[:, np.minimum(position, count - 1)]
            positions[:, row] = np.where(position < count, in_prompt, position + prompt.shift)
        return positions


def complete(session: VisionLanguageSession, prompts: Sequence[ImagePrompt], settings: Settings) -> list[Completion]:
    """Return the text behind each prompt."""
    rows = _rows(session, prompts, settings)
    for _ in _generate(session, prompts, rows):
        pass
    return [Completion.from_row(row) for row in rows]


def steps(session: VisionLanguageSession, prompts: Sequence[ImagePrompt], settings: Settings) -> Iterator[Step]:
    """Make the texts behind prompts step by step.

    Args:
        session: the model.
        prompts: as from :meth:`VisionLanguageSession.prompt`.
        settings: how tokens are chosen, and when a text ends.

    Raises:
        InputError: see :func:`graphopt.inference.decoding.continuation.start`.
    """
    return _generate(session, prompts, _rows(session, prompts, settings))


def _rows(session: VisionLanguageSession, prompts: Sequence[ImagePrompt], settings: Settings) -> list[Continuation]:
    return [
        start(session.decoder, prompt.tokens, settings, name=f"prompt {number}", occurrence=number - 1)
        for number, prompt in enumerate(prompts, start=1)
    ]


def _generate(
    session: VisionLanguageSession, prompts: Sequence[ImagePrompt], rows: Sequence[Continuation]
) -> Iterator[Step]:
    longest = max(len(row.prompt) for row in rows)
    ids, mask = np.zeros((2, len(rows), longest), np.int64)
    for number, row in enumerate(rows):
        ids[number, longest - len(row.prompt) :] = row.prompt
        mask[number, longest - len(row.prompt) :] = 1
    decoder = ImageDecoder(session.decoder, prompts, session.image_token, room=room_for(rows))
    return run(decoder, rows, ids, mask)


def load_vision_language(
    path: str | Path, *, threads: int = 0, native: bool = True, device: Device = "cpu"
) -> VisionLanguageSession:
    """Open an artifact folder of a vision-language model.

    Args:
        path: the folder.
        threads: threads that one operator may use; 0 lets onnxruntime choose.
        native: use graphopt's own kernels where they were built.
        device: what to compute on; ``cuda`` is an NVIDIA GPU.

    Raises:
        InputError: see :func:`graphopt.inference.session.load`; or the model is of another kind.
        MissingDependencyError: onnxruntime is not installed, or has no provider for the device.
    """
    model = open_folder(path, threads=threads, native=native, device=device)
    return vision_language_of(model, threads=threads, native=native, device=device)


def vision_language_of(
    model: OpenModel, *, threads: int = 0, native: bool = True, device: Device = "cpu"
) -> VisionLanguageSession:
    """Return the vision-language model whose decoder was opened; its vision tower is opened with the same options.

    Raises:
        InputError: it is none, or a graph is missing.
    """
    task = TASKS[model.manifest.task]
    if task is not VISION_LANGUAGE:
        raise InputError(
            f"this model is of the kind {task.name}, which reads no images beside a text",
            file=model.file,
            remedy="give the folder of a vision-language model; graphopt.load opens a causal language model",
        )
    vision = open_folder(model.file.parent / _VISION, threads=threads, native=native, device=device)
    return VisionLanguageSession(vision, session_from(model, native, device))
