"""The graph between the other two: embeddings of tokens, with the features of images at the places of image tokens.

Inputs: ``input_ids`` int64 [batch, length], and ``image_features`` float [image tokens, width], of all images one
behind the other; [0, width] where there is none. Output: ``inputs_embeds`` [batch, length, width]. The n-th image token
of the batch gets the n-th row of the features; one without a row has the embedding of its token. Where the decoder
reads features of inner layers of the tower too (see :func:`graphopt.tasks.image_inputs.stacked_features_of`), a row of
features has them behind the first ``width`` numbers, and an embedding of a token has zeros there.

Where tokens see others behind them (see :func:`graphopt.tasks.image_inputs.two_sided_part`), one more number stands
behind an embedding: its mark, 1 for such a token, else 0. Marked tokens that stand one behind the other are a block,
whose tokens all see one another; a block is fed in one call.
"""

from __future__ import annotations

import copy
import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from graphopt.analysis.structure.ports import IMAGE_FEATURES, INPUT_IDS, INPUTS_EMBEDS
from graphopt.errors import InputError
from graphopt.graph.diagnostics import Fact, Rule
from graphopt.ort.session import run
from graphopt.tasks.base import BATCH, LENGTH, Floats, Probe, Task, sample_tokens
from graphopt.tasks.encoder import cosines_with_start, vocabulary_of
from graphopt.tasks.image_inputs import stacked_features_of, two_sided_part
from graphopt.tasks.ports import Array, IntArray, port_of_value

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    import onnx_ir as ir
    import onnxruntime

TOKENS = Rule("token_embedding.tokens", "{batch} x {length} random tokens, {images} of them of images")

_IMAGE_TOKENS = 5
"""Image tokens of the first row of a probe."""


@dataclass(frozen=True)
class EmbeddingProbe:
    """Random tokens, some of them of images, and random features.

    Attributes:
        feeds: see :class:`graphopt.tasks.base.Probe`.
    """

    feeds: Mapping[str, Array]

    @property
    def tokens(self) -> Fact:
        """See :class:`graphopt.tasks.base.Probe`."""
        return TOKENS(batch=BATCH, length=LENGTH, images=len(self.feeds[IMAGE_FEATURES]))

    @property
    def real(self) -> npt.NDArray[np.bool_]:
        """See :class:`graphopt.tasks.base.Probe`: all."""
        return np.ones((BATCH, LENGTH), bool)

    def run(self, session: onnxruntime.InferenceSession) -> Floats:
        """Return the embeddings, [tokens, width]."""
        (embeddings,) = run(session, [INPUTS_EMBEDS], self.feeds)
        rows: Floats = embeddings.reshape(-1, embeddings.shape[-1]).astype(np.float64)
        return rows

    def matching_rows(self, before: Floats, after: Floats) -> Floats:
        """Return ``before``: everything stays where it is."""
        del after
        return before

    def figures(self, first: Floats, after: Floats) -> dict[str, float]:
        """Return cosines with the embeddings before any pass."""
        return cosines_with_start(first, after)


class TokenEmbedding(Task):
    """See the module for the ports."""

    name: ClassVar[str] = "token_embedding"
    noun: ClassVar[str] = "the token embedding of a vision-language model"
    quantity: ClassVar[str] = "embeddings"
    output: ClassVar[str] = INPUTS_EMBEDS
    unrolls: ClassVar[bool] = False
    dimensions: ClassVar[Mapping[str, tuple[str, ...]]] = {
        INPUT_IDS: ("batch", "length"),
        IMAGE_FEATURES: ("image_tokens", "width"),
    }

    def matches(self, inputs: Collection[str], outputs: Collection[str]) -> bool:
        """See :class:`Task`."""
        return set(inputs) == {INPUT_IDS, IMAGE_FEATURES} and set(outputs) == {INPUTS_EMBEDS}

    def check(self, graph: ir.Graph) -> None:
        """See :class:`Task`."""
        _width(graph)

    def probe(self, graph: ir.Graph, *, context: int = 0) -> Probe:
        """See :class:`Task`."""
        del context
        random = np.random.default_rng(0)
        ids = random.integers(0, vocabulary_of(graph) or 2, (BATCH, LENGTH))
        image_token = image_token_of(graph)
        if image_token is not None:
            ids[ids == image_token] = image_token - 1 if image_token else 1
            ids[0, 1 : 1 + _IMAGE_TOKENS] = ids[1, 0] = image_token
        count = 0 if image_token is None else _IMAGE_TOKENS + 1
        return EmbeddingProbe(self.feeds_of(graph, ids, random.standard_normal((count, _width(graph)))))

    def text_feeds(self, graph: ir.Graph, input_ids: IntArray) -> Mapping[str, Array]:
        """See :class:`Task`; a text has no images."""
        return self.feeds_of(graph, input_ids, np.zeros((0, _width(graph))))

    def feeds_of(self, graph: ir.Graph, input_ids: IntArray, features: Array) -> dict[str, Array]:
        """Return what to feed for tokens [batch, length] and features of their images [image tokens, width]."""
        dtype = next(port.dtype for port in map(port_of_value, graph.inputs) if port.name == IMAGE_FEATURES)
        return {INPUT_IDS: input_ids, IMAGE_FEATURES: features.astype(dtype or np.float32)}

    def export_parts(self, model: Any, source: str) -> tuple[Any, dict[str, Any]]:
        """Return the lookup of tokens alone, with a place for images, and tokens to trace it with."""
        del source
        torch = importlib.import_module("torch")
        image_token = model.config.image_token_id
        ids = sample_tokens(model)[INPUT_IDS]
        ids[0, :2] = image_token
        embed = model.get_input_embeddings()
        width = embed(ids[:1, :1]).shape[-1]
        inner_width = width * stacked_features_of(model.config)
        marked_part = two_sided_part(type(model))
        is_in_table = image_token < embed.num_embeddings

        def forward(input_ids: Any, image_features: Any) -> dict[str, Any]:
            is_image = input_ids == image_token
            embeddings = embed(input_ids if is_in_table else input_ids.masked_fill(is_image, 0))
            if inner_width:
                embeddings = torch.nn.functional.pad(embeddings, (0, inner_width))
            number = is_image.reshape(-1).cumsum(0).reshape(is_image.shape) - 1
            # A row of zeros behind the features, which tokens read that are none of an image: no index is outside.
            rows = torch.cat([image_features, image_features.new_zeros(1, image_features.shape[1])])
            count = image_features.shape[0]
            has_row = is_image & (number < count)
            index = torch.where(has_row, number, torch.full_like(number, count))
            embeddings = torch.where(has_row[..., None], rows[index], embeddings)
            if marked_part:
                is_marked = has_row if marked_part == "image" else has_row.any(dim=1, keepdim=True).expand_as(has_row)
                embeddings = torch.cat([embeddings, is_marked[..., None].to(embeddings.dtype)], dim=-1)
            return {INPUTS_EMBEDS: embeddings}

        part = copy.copy(model)
        part.forward = forward
        return part, {INPUT_IDS: ids, IMAGE_FEATURES: torch.ones(3, width + inner_width)}


def image_token_of(graph: ir.Graph) -> int | None:
    """Return the token whose places features take: the one that the graph compares tokens with."""
    tokens = next(value for value in graph.inputs if value.name == INPUT_IDS)
    for node in tokens.consumers():
        constants = [value.const_value for value in node.inputs if value is not None and value.const_value is not None]
        if node.op_type == "Equal" and constants and constants[0].size == 1:
            return int(np.asarray(constants[0].numpy()).item())
    return None


def _width(graph: ir.Graph) -> int:
    """Return the numbers of a row of features.

    Raises:
        InputError: the graph does not say.
    """
    port = next((port for port in map(port_of_value, graph.inputs) if port.name == IMAGE_FEATURES), None)
    width = port.shape[-1] if port is not None and port.shape else None
    if width is None:
        raise InputError("the graph does not say how wide features are", tensor=IMAGE_FEATURES)
    return width


TOKEN_EMBEDDING = TokenEmbedding()
