"""An encoder-decoder, opened in onnxruntime: sources in, texts out.

The encoder runs once for a batch of sources. The keys and values that it makes are bound as inputs of the decoder and
stay where they are: a step reads them, and appends to the keys and values of the text alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from graphopt.analysis.structure.ports import ENCODER_MASK, INPUT_FEATURES, is_cross_port
from graphopt.artifact.tokens import TOKENIZER
from graphopt.errors import InputError
from graphopt.inference.decoding.continuation import start
from graphopt.inference.decoding.decoder import Decoder
from graphopt.inference.generation import Completion, room_for, run
from graphopt.inference.session import OpenModel, Session, open_folder, session_from
from graphopt.ort.session import ort_value
from graphopt.tasks import TASKS
from graphopt.tasks.encoder import EncoderInterface
from graphopt.tasks.seq2seq import SEQ2SEQ
from graphopt.tasks.seq2seq.encoder import recordings_port

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from graphopt.inference.decoding.continuation import Continuation, Settings
    from graphopt.inference.decoding.decoder import Logits
    from graphopt.inference.generation import Step
    from graphopt.tasks.ports import Array, IntArray
    from graphopt.util.targets import Device

Source = Mapping[str, Any]
"""What the decoder reads of a batch of sources: values of onnxruntime by input name."""

_ENCODER = "encoder"


@dataclass(frozen=True)
class Seq2SeqSession:
    """An encoder-decoder that is ready to run.

    Attributes:
        encoder: the graph that reads sources.
        decoder: the graph that makes texts.
    """

    encoder: OpenModel
    decoder: Session

    @property
    def reads_recordings(self) -> bool:
        """Whether a source is a recording, and not a text."""
        return any(port.name == INPUT_FEATURES for port in self.encoder.inference.get_inputs())

    @property
    def beginning(self) -> list[int]:
        """The tokens that a text begins with, in front of that of the language where there is one.

        Raises:
            InputError: the configuration does not say.
        """
        tokens = self.decoder.manifest.model.decoder_start
        if not tokens:
            raise InputError(
                "the configuration does not say with which token a text begins",
                file=self.decoder.file.parent,
                remedy="set decoder_start_token_id in its generation_config.json, and export it again",
            )
        return tokens

    def beginnings(self, source: Source, language: str | None = None) -> list[list[int]]:
        """Return the tokens that the text of each source begins with.

        Args:
            source: as from :meth:`source_of_texts` or :meth:`source_of_recordings`.
            language: of the sources, such as ``en``; ``None``: the model finds out, where it knows several.

        Raises:
            InputError: the model does not know the language, or no language; or see :attr:`beginning`.
        """
        facts, batch = self.decoder.manifest.model, _batch_of(source)
        if language is not None and language not in facts.languages:
            raise InputError(
                f"the model does not know the language {language}",
                file=self.decoder.file.parent,
                remedy=f"it knows {', '.join(facts.languages)}" if facts.languages else "leave it out",
            )
        if not facts.languages:
            return [self.beginning] * batch
        if language is not None:
            chosen_tokens = [facts.languages[language]] * batch
        else:
            tokens = np.array(sorted(facts.languages.values()))
            decoder = SourceDecoder(self.decoder, source, batch)
            logits = decoder.step(np.array([self.beginning] * batch, np.int64))[:, -1]
            chosen_tokens = tokens[logits[:, tokens].argmax(-1)].tolist()
        return [[*self.beginning, token, *facts.decoder_task] for token in chosen_tokens]

    def encode(self, texts: Sequence[str]) -> tuple[IntArray, IntArray]:
        """Return tokens and mask of texts to read, int64 [batch, length], padded at the end.

        Raises:
            InputError: there is no text or no tokenizer, a text has no token, or the sources are recordings.
        """
        tokenizer = self.decoder.tokenizer
        if self.reads_recordings:
            raise InputError("the model reads recordings, and no texts", file=self.encoder.file, remedy="give --audio")
        if tokenizer is None:
            raise InputError(
                f"this model has no {TOKENIZER}, so it can read no text",
                file=self.decoder.file.parent,
                remedy=f"put the {TOKENIZER} of the model into the folder",
            )
        sequences = [tokenizer.encode(text).ids for text in texts]
        if not sequences or not all(sequences):
            raise InputError("there is no source, or one is empty", remedy="give each at least one token")
        ids = np.full((len(sequences), max(map(len, sequences))), self.decoder.manifest.model.pad_token_id or 0)
        mask = np.zeros_like(ids)
        for row, sequence in enumerate(sequences):
            ids[row, : len(sequence)], mask[row, : len(sequence)] = sequence, 1
        return ids.astype(np.int64), mask.astype(np.int64)

    def source_of_texts(self, ids: IntArray, mask: IntArray) -> dict[str, Any]:
        """Run the encoder once, and return what the decoder reads of texts [batch, length], by input name.

        Raises:
            InputError: a text is padded and the encoder has no mask, or the run fails.
        """
        inference = self.encoder.inference
        interface = EncoderInterface.of_session(inference, inference.get_outputs()[0].name)
        source = self._run_encoder(interface.feeds(ids, mask))
        if ENCODER_MASK in self.decoder.interface.inputs:
            source[ENCODER_MASK] = ort_value(mask)
        return source

    def source_of_recordings(self, features: Array) -> dict[str, Any]:
        """Run the encoder once on recordings [batch, bands, frames], as :meth:`source_of_texts` does on texts.

        Raises:
            InputError: the features have another shape than the encoder takes, or the run fails.
        """
        port = recordings_port(self.encoder.inference.get_inputs())
        sizes = [] if port is None else list(port.shape[1:])
        if port is None or [*features.shape[1:]] != sizes:
            raise InputError(
                f"a recording has the shape {list(features.shape[1:])}, and the encoder takes {sizes}",
                file=self.encoder.file,
                remedy="make features with the preprocessor_config.json of this model",
            )
        return self._run_encoder({INPUT_FEATURES: features.astype(port.dtype or np.float32)})

    def _run_encoder(self, feeds: Mapping[str, Array]) -> dict[str, Any]:
        inference = self.encoder.inference
        names = [port.name for port in inference.get_outputs() if is_cross_port(port.name)]
        binding = inference.io_binding()
        for name, array in feeds.items():
            binding.bind_ortvalue_input(name, ort_value(np.ascontiguousarray(array)))
        for name in names:
            binding.bind_output(name, self.decoder.device)
        try:
            inference.run_with_iobinding(binding)
        except Exception as error:
            raise InputError(f"onnxruntime cannot run the model: {error}", file=self.encoder.file) from error
        return dict(zip(names, binding.get_outputs(), strict=True))


class SourceDecoder(Decoder):
    """A decoder behind sources, which are bound once.

    Args:
        session: the model.
        source: what its encoder made of the sources, by input name.
        batch: number of sources.
        room: as for :class:`Decoder`.
    """

    def __init__(self, session: Session, source: Source, batch: int, *, room: int = 0) -> None:
        super().__init__(session, batch, room=room)
        self._facts = session.manifest.model
        for name, value in source.items():
            self._binding.bind_ortvalue_input(name, value)

    def step(self, input_ids: IntArray, mask: IntArray | None = None) -> Logits:
        """See :class:`Decoder`; tokens that the configuration suppresses have the logit minus infinity."""
        is_first = self.length == 0
        logits = super().step(input_ids, mask)
        suppressed_ids = [*self._facts.suppressed_tokens, *(self._facts.suppressed_at_first if is_first else ())]
        if suppressed_ids:
            logits = logits.copy()
            logits[..., suppressed_ids] = -np.inf
        return logits


def complete(
    session: Seq2SeqSession, source: Source, settings: Settings, language: str | None = None
) -> list[Completion]:
    """Return the text of each source, see :func:`steps`."""
    rows = _rows(session, source, settings, language)
    for _ in _generate(session, source, rows):
        pass
    return [Completion.from_row(row) for row in rows]


def steps(session: Seq2SeqSession, source: Source, settings: Settings, language: str | None = None) -> Iterator[Step]:
    """Make the texts of sources step by step.

    Args:
        session: the model.
        source: as from :meth:`Seq2SeqSession.source_of_texts` or :meth:`Seq2SeqSession.source_of_recordings`.
        settings: how tokens are chosen, and when a text ends.
        language: of the sources, see :meth:`Seq2SeqSession.beginnings`.

    Raises:
        InputError: see :func:`graphopt.inference.decoding.continuation.start`; or the configuration does not say how a
            text begins.
    """
    return _generate(session, source, _rows(session, source, settings, language))


def _rows(session: Seq2SeqSession, source: Source, settings: Settings, language: str | None) -> list[Continuation]:
    return [
        start(session.decoder, beginning, settings, name=f"source {number + 1}", occurrence=number)
        for number, beginning in enumerate(session.beginnings(source, language))
    ]


def _batch_of(source: Source) -> int:
    return next(int(value.shape()[0]) for value in source.values())


def _generate(session: Seq2SeqSession, source: Source, rows: Sequence[Continuation]) -> Iterator[Step]:
    decoder = SourceDecoder(session.decoder, source, len(rows), room=room_for(rows))
    return run(decoder, rows, np.array([row.prompt for row in rows], np.int64))


def load_seq2seq(path: str | Path, *, threads: int = 0, native: bool = True, device: Device = "cpu") -> Seq2SeqSession:
    """Open an artifact folder of an encoder-decoder.

    Args:
        path: the folder.
        threads: threads that one operator may use; 0 lets onnxruntime choose.
        native: use graphopt's own kernels where they were built.
        device: what to compute on; ``cuda`` is an NVIDIA GPU.

    Raises:
        InputError: see :func:`graphopt.inference.session.load`; or the model is no encoder-decoder.
        MissingDependencyError: onnxruntime is not installed, or has no provider for the device.
    """
    model = open_folder(path, threads=threads, native=native, device=device)
    return seq2seq_of(model, threads=threads, native=native, device=device)


def seq2seq_of(model: OpenModel, *, threads: int = 0, native: bool = True, device: Device = "cpu") -> Seq2SeqSession:
    """Return the encoder-decoder whose decoder was opened; its encoder is opened with the same options.

    Raises:
        InputError: it is none, or its encoder is missing.
    """
    task = TASKS[model.manifest.task]
    if task is not SEQ2SEQ:
        raise InputError(
            f"this model is of the kind {task.name}, which reads no source",
            file=model.file,
            remedy="give the folder of an encoder-decoder; graphopt.load opens a causal language model",
        )
    folder = model.file.parent / _ENCODER
    encoder = open_folder(folder, threads=threads, native=native, device=device)
    return Seq2SeqSession(encoder, session_from(model, native, device))
