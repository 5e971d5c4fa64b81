"""An artifact folder opened in onnxruntime, ready to compute logits, completions or a score."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from graphopt.analysis.structure.paged_caches import OPERATOR
from graphopt.analysis.structure.ports import INPUTS_EMBEDS
from graphopt.artifact import artifact
from graphopt.artifact.hf_config import facts_of, with_positions
from graphopt.artifact.manifest import MANIFEST, Manifest, Source, read_manifest
from graphopt.artifact.tokens import TOKENIZER, beginning_of, read_tokenizer
from graphopt.errors import InputError
from graphopt.inference.states.key_shifts import KeyShifts
from graphopt.inference.token_embedding import TokenEmbedding, embedding_beside
from graphopt.ort.session import NO_ENTRIES, Entries, native_operators, open_session, run
from graphopt.runtime_ops import library_path
from graphopt.runtime_ops.instructions import instructions_here
from graphopt.tasks import TASKS, task_of_ports
from graphopt.tasks.causal_lm.interface import Interface
from graphopt.tasks.ports import port_of_node

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import onnxruntime
    from tokenizers import Tokenizer

    from graphopt.graph.diagnostics import Fact
    from graphopt.tasks.ports import Array, IntArray
    from graphopt.util.targets import Device

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Session:
    """A model that is ready to run.

    Attributes:
        file: the ``.onnx`` file.
        inference: the onnxruntime session on it.
        interface: how the graph is fed and read.
        manifest: how the artifact came to be; of a plain model, what its ``config.json`` says.
        tokenizer: text to tokens and back, or ``None`` where the folder has none.
        native: whether graphopt's own kernels take the nodes of its operators, where they were built.
        device: what the session computes on.
        notes: what to know about running it on this machine.
        embedding: of a graph that reads embeddings, what makes them.
    """

    file: Path
    inference: onnxruntime.InferenceSession
    interface: Interface
    manifest: Manifest
    tokenizer: Tokenizer | None
    native: bool = True
    device: Device = "cpu"
    notes: tuple[Fact, ...] = ()
    embedding: TokenEmbedding | None = None

    @cached_property
    def in_place(self) -> bool:
        """Whether caches in pages may be input and output at once: only graphopt's kernel writes in place."""
        return self.native and OPERATOR in native_operators(self.device)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 that identifies this model: of its files by the manifest, else of the ``.onnx`` file."""
        records = {
            name: record.sha256 for name, record in self.manifest.files.items() if name.startswith(artifact.MODEL)
        }
        if records:
            return hashlib.sha256("".join(records[name] for name in sorted(records)).encode()).hexdigest()
        with self.file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()

    @cached_property
    def key_shifts(self) -> KeyShifts:
        """How keys of the caches turn where their tokens move.

        Raises:
            InputError: not only keys know positions.
        """
        return KeyShifts(self)

    @property
    def max_positions(self) -> int | None:
        """How many tokens a sequence may have, or ``None`` where that is unknown or caches drop old tokens."""
        return None if self.endless else self.manifest.model.max_positions

    @property
    def endless(self) -> bool:
        """Whether sequences have no maximum length: all caches drop old tokens, and all distances were trained on."""
        positions, reach = self.manifest.model.max_positions, self.interface.reach
        return reach is not None and (positions is None or reach <= positions)

    @cached_property
    def beginning(self) -> tuple[int, ...]:
        """The tokens that the tokenizer puts before every text: a BOS token, or none."""
        return beginning_of(self.require_tokenizer())

    def encode(self, text: str) -> list[int]:
        """Return the tokens of ``text``, with those that the tokenizer puts before it (see :attr:`beginning`).

        Raises:
            InputError: the folder has no tokenizer.
        """
        return list(self.require_tokenizer().encode(text).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids`` without special tokens.

        Raises:
            InputError: the folder has no tokenizer.
        """
        return str(self.require_tokenizer().decode(list(ids), skip_special_tokens=True))

    def logits(self, input_ids: IntArray) -> Floats:
        """Return the logits of sequences that have no past and no padding, in one run.

        Args:
            input_ids: tokens [batch, length].

        Returns:
            Natural logits [batch, length, vocabulary], converted to float32 where the graph computes in another type.

        Raises:
            InputError: a token is not in the vocabulary, the length exceeds the model's positions, the model makes
                logits of the last position only, or the run fails.
        """
        self.check_all_logits()
        input_ids = np.asarray(input_ids, np.int64)
        self.check_tokens(input_ids)
        self.check_length(input_ids.shape[-1])
        batch, length = input_ids.shape
        feeds = self.interface.feeds(input_ids, np.ones_like(input_ids), self.interface.empty_past(batch, length))
        feeds |= self.embeddings(input_ids)
        return self._run(feeds).astype(np.float32, copy=False)

    def embeddings(self, input_ids: IntArray) -> dict[str, Array]:
        """Return what a graph that reads embeddings is fed of tokens without images; nothing for one that reads tokens.

        Raises:
            InputError: the graph that makes embeddings is missing.
        """
        return {INPUTS_EMBEDS: self.require_embedding().embed(input_ids)} if self.interface.reads_embeddings else {}

    def require_embedding(self) -> TokenEmbedding:
        """Return what makes embeddings of tokens.

        Raises:
            InputError: there is nothing.
        """
        if self.embedding is None:
            raise InputError(
                "the graph reads embeddings, and none lies beside it that makes them of tokens",
                file=self.file,
                tensor=INPUTS_EMBEDS,
                remedy="give the folder of a vision-language model that `graphopt export` wrote",
            )
        return self.embedding

    def check_tokens(self, ids: npt.ArrayLike) -> None:
        """Refuse tokens that are not in the model's vocabulary.

        Raises:
            InputError: a token is negative, or not below the width of the logits.
        """
        tokens = np.asarray(ids, np.int64)
        vocabulary = self.interface.vocabulary
        wrong = tokens[(tokens < 0) | (tokens >= (np.inf if vocabulary is None else vocabulary))]
        if wrong.size:
            raise InputError(
                f"there is no token {wrong[0]} in a vocabulary of {vocabulary}",
                file=self.file,
                remedy="is this the tokenizer that the model was trained with?",
            )

    def check_all_logits(self) -> None:
        """Refuse a model that computes logits of the last positions only.

        Raises:
            InputError: it does.
        """
        count = self.interface.last_logits
        if count is not None:
            recipe = (self.manifest.recipe or {}).get("name")
            made_by = f" by the step last_logits of its recipe {recipe}" if recipe else ""
            scope = "position" if count == 1 else f"{count} positions"
            raise InputError(
                f"the model computes logits of the last {scope} only{made_by}; this needs those of every position",
                file=self.file,
                tensor="logits",
                remedy="use the model without that step: it generates the same text",
            )

    def check_length(self, length: int) -> None:
        """Refuse a sequence that is longer than the model's positions.

        Raises:
            InputError: ``length``, in tokens, exceeds the model's positions.
        """
        if self.max_positions is not None and length > self.max_positions:
            raise InputError(
                f"a sequence of {length} tokens is longer than the model's {self.max_positions} positions",
                file=self.file,
                remedy="shorten it",
            )

    def failure(self, error: Exception) -> InputError:
        """Return an error that passes on what onnxruntime said about a failed run."""
        return InputError(f"onnxruntime cannot run the model: {error}", file=self.file)

    def require_tokenizer(self) -> Tokenizer:
        """Return the tokenizer.

        Raises:
            InputError: the folder has none.
        """
        if self.tokenizer is None:
            raise InputError(
                f"this model has no {TOKENIZER}, so it can read and write tokens but no text",
                file=self.file.parent,
                remedy=f"put the {TOKENIZER} of the model into the folder, or give tokens",
            )
        return self.tokenizer

    def _run(self, feeds: Mapping[str, Array]) -> npt.NDArray[Any]:
        try:
            return run(self.inference, ["logits"], feeds)[0]
        except Exception as error:
            raise self.failure(error) from error


def load(path: str | Path, *, threads: int = 0, native: bool = True, device: Device = "cpu") -> Session:
    """Open an artifact folder, or a plain ``.onnx`` file or folder with the names of an artifact's interface.

    Args:
        path: the folder, or the file; ``tokenizer.json`` and ``config.json`` are looked for beside the model.
        threads: threads that one operator may use; 0 lets onnxruntime choose.
        native: use graphopt's own kernels where they were built.
        device: what to compute on; ``cuda`` is an NVIDIA GPU.

    Raises:
        InputError: a file is missing, has another size than its manifest says, or cannot be read; or the device is not
            available (see :func:`graphopt.ort.session.open_session`); or the model is no causal language model.
        MissingDependencyError: onnxruntime is not installed, or has no provider for the device.
    """
    return session_from(open_folder(path, threads=threads, native=native, device=device), native, device)


def session_from(model: OpenModel, native: bool = True, device: Device = "cpu") -> Session:
    """Return the causal language model that was opened.

    Args:
        model: the model.
        native: whether it was opened with graphopt's own kernels.
        device: what it was opened to compute on.

    Raises:
        InputError: it is no causal language model, or its caches are cut to a window.
    """
    task = model.manifest.task
    if not TASKS[task].generates:
        raise InputError(
            f"this model is of the kind {task}, which makes no text",
            file=model.file,
            remedy="`graphopt run` and `graphopt eval` take it; graphopt.load_encoder opens an encoder",
        )
    interface = Interface.of_session(model.inference)
    if interface.windows:
        raise InputError(
            "its caches are cut to a window, and tokens could not be taken back",
            file=model.file,
            tensor=next(iter(interface.windows)),
            remedy="make an artifact of the file that it came from: `graphopt export`, or `graphopt optimize`",
        )
    if interface.has_shared_pool:
        raise InputError(
            "this model is made for an engine that many requests share, such as onnxruntime-genai's",
            file=model.file,
            remedy="run it there, see docs/serving.md; or optimize without the step serve",
        )
    return Session(interface=interface, native=native, device=device, **vars(model))


@dataclass(frozen=True)
class OpenModel:
    """A model of any kind in onnxruntime, with its manifest and tokenizer; see :class:`Session` for the attributes."""

    file: Path
    inference: onnxruntime.InferenceSession
    manifest: Manifest
    tokenizer: Tokenizer | None
    notes: tuple[Fact, ...] = ()
    embedding: TokenEmbedding | None = None

    def with_prompt(self, name: str | None) -> OpenModel:
        """Return the model with the prompt of this name as its default; as it is for ``None``.

        Raises:
            InputError: the checkpoint has no such prompt.
        """
        if name is None:
            return self
        prompts = self.manifest.model.prompts
        if name not in prompts:
            raise InputError(
                f"the checkpoint has no prompt {name}",
                file=self.file.parent,
                remedy=f"it has {', '.join(prompts)}" if prompts else "leave it out: it has none",
            )
        facts = self.manifest.model.model_copy(update={"default_prompt": name})
        return replace(self, manifest=self.manifest.model_copy(update={"model": facts}))


def open_folder(
    path: str | Path, *, threads: int = 0, native: bool = True, device: Device = "cpu", entries: Entries = NO_ENTRIES
) -> OpenModel:
    """Open a model of any kind, with ``entries`` beside those of its manifest; see :func:`load` for the rest."""
    path = Path(path)
    file = path / artifact.MODEL if path.is_dir() else path
    if not file.is_file():
        remedy = f"give a folder that holds {artifact.MODEL}, or an .onnx file"
        raise InputError("there is no ONNX model here", file=path, remedy=remedy)
    folder, manifest = file.parent, None
    if path.is_dir() and (folder / MANIFEST).is_file():
        manifest = read_manifest(folder)
        # Checking sizes is cheap and finds truncated copies, the usual damage.
        artifact.check_sizes(folder, manifest, manifest.files)
    entries = {**({} if manifest is None else manifest.session), **entries}
    inference = open_session(file, entries=entries, threads=threads, native=native, device=device)
    if manifest is None:
        manifest = _manifest_of(path, folder, inference)
    notes = _notes(manifest) if native and device == "cpu" and library_path() is not None else ()
    embedding = embedding_beside(folder, manifest, threads, native)
    return OpenModel(file, inference, manifest, read_tokenizer(folder / TOKENIZER), notes, embedding)


def _manifest_of(path: Path, folder: Path, inference: onnxruntime.InferenceSession) -> Manifest:
    """Return what a plain model tells of itself by its ports, its metadata and the configuration beside it."""
    ports = (map(port_of_node, nodes) for nodes in (inference.get_inputs(), inference.get_outputs()))
    task = task_of_ports(*({port.name: port for port in side} for side in ports)).name
    facts = with_positions(facts_of(folder, task), inference.get_modelmeta().custom_metadata_map)
    return Manifest(source=Source(kind="onnx", name=str(path)), task=task, model=facts)


def _notes(manifest: Manifest) -> tuple[Fact, ...]:
    """Return what it costs that kernels were chosen for another instruction set than this machine has, if anything."""
    steps: list[dict[str, Any]] = (manifest.recipe or {}).get("steps", [])
    lower = next((step for step in steps if step["step"] == "lower"), {})
    if lower.get("target") != "ort-cpu" or lower.get("instructions") in (None, instructions_here()):
        return ()
    from graphopt.inference.kernel_choice import elsewhere  # it takes time, and most sessions do not need it

    return tuple(filter(None, [elsewhere(manifest.passes, lower["instructions"], instructions_here())]))
