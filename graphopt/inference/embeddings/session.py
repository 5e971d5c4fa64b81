"""An encoder, opened in onnxruntime and ready to be asked for embeddings of texts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from graphopt.analysis.structure.ports import HIDDEN
from graphopt.artifact.tokens import TOKENIZER
from graphopt.errors import GraphoptError, InputError
from graphopt.inference.embeddings.pooling import pool
from graphopt.inference.session import OpenModel, open_folder
from graphopt.ort.session import run
from graphopt.tasks.encoder import Encoder, EncoderInterface

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import onnxruntime
    from tokenizers import Tokenizer

    from graphopt.artifact.manifest import Manifest
    from graphopt.tasks.ports import IntArray
    from graphopt.util.targets import Device

Floats = npt.NDArray[np.float32]

_BATCH = 32
# As torch.nn.functional.normalize: an embedding of zeros stays one.
_SHORTEST = 1e-12


@dataclass(frozen=True)
class EncoderSession:
    """An encoder that is ready to run.

    Attributes:
        file: the ``.onnx`` file.
        inference: the onnxruntime session on it.
        interface: how the graph is fed and read.
        manifest: how the artifact came to be; of a plain model, what the files beside it say.
        tokenizer: text to tokens, or ``None`` where the folder has none.
    """

    file: Path
    inference: onnxruntime.InferenceSession
    interface: EncoderInterface
    manifest: Manifest
    tokenizer: Tokenizer | None

    @property
    def max_positions(self) -> int | None:
        """How many tokens a text may have, special ones included; ``None`` where that is not known."""
        return self.manifest.model.max_positions

    def encode(self, text: str, prompt: str | None = None) -> list[int]:
        """Return the tokens of ``text`` behind a prompt, with the special tokens of the tokenizer.

        Args:
            text: the text.
            prompt: the purpose of the embedding, such as ``query``: what the checkpoint puts in front of such texts is
                put there. ``None``: the checkpoint's default, mostly nothing.

        Raises:
            InputError: the folder has no tokenizer, the checkpoint has no such prompt, or the text has no token.
        """
        if self.tokenizer is None:
            raise InputError(
                f"this model has no {TOKENIZER}, so it can read no text",
                file=self.file.parent,
                remedy=f"put the {TOKENIZER} of the model into the folder, or give tokens",
            )
        ids = list(self.tokenizer.encode(self._prompt(prompt) + text).ids)
        if not ids:
            raise InputError("the text is empty: an embedding takes one token at least")
        return ids

    def _prompt(self, name: str | None) -> str:
        """Return what is put in front of texts for a purpose."""
        facts = self.manifest.model
        name = facts.default_prompt if name is None else name
        if name is not None and name not in facts.prompts and name != facts.default_prompt:
            raise InputError(
                f"the checkpoint has no prompt {name}",
                file=self.file.parent,
                remedy=f"it has {', '.join(facts.prompts)}" if facts.prompts else "leave it out: it has none",
            )
        return "" if name is None else facts.prompts.get(name, "")

    @cached_property
    def _dense_weights(self) -> list[dict[str, Floats]]:
        """The layers behind the pooling, by the names in their files."""
        from safetensors.numpy import load_file

        weights: list[dict[str, Floats]] = []
        for layer in self.manifest.model.dense:
            file = self.file.parent / layer.file
            if not file.is_file():
                raise InputError(
                    "the weights of a layer behind the pooling are not here",
                    file=file,
                    remedy="copy them there, or make the artifact again with `graphopt export`",
                )
            weights.append(load_file(file))
        return weights

    def hidden(self, input_ids: IntArray, attention_mask: IntArray) -> Floats:
        """Return the hidden states [batch, length, width] of tokens [batch, length], where the mask is 1.

        Raises:
            InputError: a text has more tokens than the model has positions, there is padding and the graph takes none,
                or the run fails.
        """
        self._check_length(input_ids.shape[1])
        return self._run(HIDDEN, input_ids, attention_mask)

    def _check_length(self, length: int) -> None:
        if self.max_positions is not None and length > self.max_positions:
            raise InputError(
                f"a text of {length} tokens is longer than the model's {self.max_positions} positions",
                file=self.file,
                remedy="shorten it",
            )

    def _vectors(self, input_ids: IntArray, attention_mask: IntArray) -> Floats:
        """Return the embeddings [batch, numbers] of tokens [batch, length], where the mask is 1."""
        self._check_length(input_ids.shape[1])
        facts, output = self.manifest.model, self.interface.embedding
        if output is not None:
            vectors = self._run(output, input_ids, attention_mask)
        else:
            vectors = pool(self._run(HIDDEN, input_ids, attention_mask), attention_mask.astype(bool), facts.pooling)
        for layer, weights in zip(facts.dense, self._dense_weights, strict=True):
            vectors = vectors @ weights["linear.weight"].T + weights.get("linear.bias", np.float32(0))
            vectors = np.tanh(vectors) if layer.activation == "tanh" else vectors
        if facts.is_normalized:
            vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), _SHORTEST)
        return vectors.astype(np.float32, copy=False)

    def _run(self, output: str, input_ids: IntArray, attention_mask: IntArray) -> Floats:
        feeds = self.interface.feeds(input_ids, attention_mask)
        try:
            states = run(self.inference, [output], feeds)[0]
        except Exception as error:
            raise InputError(f"onnxruntime cannot run the model: {error}", file=self.file) from error
        return states.astype(np.float32, copy=False)

    def embed(
        self,
        texts: Sequence[str],
        on_progress: Callable[[int, int], None] | None = None,
        *,
        prompt: str | None = None,
    ) -> Floats:
        """Return one embedding for each text, float32 [texts, width], made of hidden states as the checkpoint says.

        Args:
            texts: the texts.
            prompt: their purpose, see :meth:`encode`.
            on_progress: called with (texts done, texts in all).

        Raises:
            InputError: see :meth:`encode` and :meth:`hidden`.
            GraphoptError: a hidden state is NaN or infinite.
        """
        return self.embed_tokens([self.encode(text, prompt) for text in texts], on_progress)

    def embed_tokens(
        self, sequences: Sequence[Sequence[int]], on_progress: Callable[[int, int], None] | None = None
    ) -> Floats:
        """Return one embedding for each sequence of tokens; see :meth:`embed`."""
        # Texts of like length share a batch, so that little of it is padding.
        order = sorted(range(len(sequences)), key=lambda index: len(sequences[index]))
        size = _BATCH if self.interface.takes_padding else 1
        embeddings: dict[int, Floats] = {}
        for first in range(0, len(order), size):
            batch = order[first : first + size]
            ids, mask = self._batch([sequences[index] for index in batch])
            vectors = self._vectors(ids, mask)
            if not np.isfinite(vectors).all():
                raise GraphoptError(
                    "the model's hidden states are not finite",
                    file=self.file,
                    tensor=HIDDEN,
                    remedy="the weights or the precision are at fault: compare with the model it was made from",
                )
            embeddings |= dict(zip(batch, vectors, strict=True))
            if on_progress is not None:
                on_progress(first + len(batch), len(order))
        return np.stack([embeddings[index] for index in range(len(sequences))])

    def _batch(self, sequences: Sequence[Sequence[int]]) -> tuple[IntArray, IntArray]:
        """Return tokens and mask [texts, length], filled up at the end."""
        length = max(len(ids) for ids in sequences)
        ids = np.full((len(sequences), length), self.manifest.model.pad_token_id or 0, np.int64)
        mask = np.zeros_like(ids)
        for row, sequence in enumerate(sequences):
            ids[row, : len(sequence)] = sequence
            mask[row, : len(sequence)] = 1
        return ids, mask


def load_encoder(path: str | Path, *, threads: int = 0, native: bool = True, device: Device = "cpu") -> EncoderSession:
    """Open an artifact folder of an encoder, or a plain ``.onnx`` file with the names of an encoder's interface.

    Args:
        path: the folder, or the file; ``tokenizer.json`` and ``config.json`` are looked for beside the model.
        threads: threads that one operator may use; 0 lets onnxruntime choose.
        native: use graphopt's own kernels where they were built.
        device: what to compute on; ``cuda`` is an NVIDIA GPU.

    Raises:
        InputError: see :func:`graphopt.inference.session.load`; or the model is no encoder.
        MissingDependencyError: onnxruntime is not installed, or has no provider for the device.
    """
    return encoder_of(open_folder(path, threads=threads, native=native, device=device))


def encoder_of(model: OpenModel) -> EncoderSession:
    """Return the encoder that was opened.

    Raises:
        InputError: it is no encoder.
    """
    if model.manifest.task != Encoder.name:
        raise InputError(
            f"this model is of the kind {model.manifest.task}, which makes no embeddings",
            file=model.file,
            remedy="graphopt.load opens a causal language model",
        )
    interface = EncoderInterface.of_session(model.inference)
    return EncoderSession(model.file, model.inference, interface, model.manifest, model.tokenizer)
