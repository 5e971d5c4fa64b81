r"""Train heads that draft for an exported model: they read its last hidden state and guess the tokens after the next.

    graphopt export stdlib_lm -o float32
    python tools/train/heads.py float32 -o heads.onnx

Texts are windows of the training text, and the model's own continuations of their beginnings: a drafter guesses a
model's text, which differs from people's. Each window is run once; its hidden states are the inputs of heads and give
their targets, since the model's probabilities of a token are the product of the lm_head and the state before it. Head k
learns those of k positions later (self-distillation, Cai et al., 2024, arXiv:2401.10774, section 2.3.2). The lm_head is
not trained.

The learning rate follows processor time: on any machine a run takes ``--minutes``, without the time to collect states.
Where the output is a folder, heads are written into that artifact, and into its manifest.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import onnx_ir as ir
import torch
import typer

import graphopt
from graphopt.analysis.structure.ports import HIDDEN
from graphopt.artifact.artifact import HEADS
from graphopt.artifact.manifest import MANIFEST, FileRecord, read_manifest
from graphopt.errors import InputError
from graphopt.graph.diagnostics import Fact
from graphopt.inference.decoding.proposers.heads import lm_head_matrix
from graphopt.inference.decoding.proposers.heads_file import HeadsFile
from graphopt.inference.decoding.sampling import GREEDY, Sampling
from graphopt.inference.generation import generate
from graphopt.inference.session import Session
from graphopt.ort.session import open_session
from graphopt.passes.interface.expose_hidden import expose
from graphopt.tasks.causal_lm.interface import Interface
from graphopt.tasks.ports import IntArray
from graphopt.util.stdlib_text import held_out_text, training_texts

_BEGINNING = 64
"""Tokens of the training text before the model's own continuation."""

_TEST_WINDOWS = 20
"""Windows of held-out text."""

_ROWS = 32
"""Texts that the model writes at once."""


class Blocks(torch.nn.Module):
    """The heads of :class:`HeadsFile`; untrained, each predicts the same as the model after the newest token."""

    def __init__(self, width: int, heads: int, inner: int, vocabulary: int, size: int) -> None:
        super().__init__()
        self.inner = torch.nn.Parameter(torch.randn(width, heads, inner) / width**0.5)
        self.embedding = torch.nn.Parameter(torch.randn(vocabulary, size))
        self.token_inner = torch.nn.Parameter(torch.randn(size, heads, inner) / size**0.5)
        self.outer = torch.nn.Parameter(torch.zeros(heads, inner, width))

    def forward(self, h: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return the states [positions, heads, width] of hidden states [positions, width] and tokens [positions]."""
        x = torch.einsum("nd,dki->nki", h, self.inner) + torch.einsum(
            "ne,eki->nki", self.embedding[tokens], self.token_inner
        )
        return h[:, None] + torch.einsum("nki,kid->nkd", torch.nn.functional.silu(x), self.outer)


@dataclasses.dataclass(frozen=True)
class Texts:
    """Texts of one length, and the model's hidden states.

    Attributes:
        tokens: int64 [texts, length].
        states: hidden states, float16 [texts, length, width].
    """

    tokens: torch.Tensor
    states: torch.Tensor

    def sample(self, number: int) -> Texts:
        """Return a random choice of texts."""
        indices = torch.randint(len(self.tokens), (number,))
        return Texts(self.tokens[indices], self.states[indices])


def open_with_hidden(folder: Path, threads: int) -> Session:
    """Open a model such that it returns its hidden states, whether its file does so or not."""
    session = graphopt.load(folder, threads=threads)
    if session.interface.gives_hidden:
        return session
    model = ir.load(session.file)
    exposure = expose(model.graph)
    if isinstance(exposure, Fact):
        raise InputError(f"this model cannot have heads: {exposure}", file=session.file)
    content = ir.to_proto(model).SerializeToString()
    inference = open_session(session.file, entries=session.manifest.session, threads=threads, content=content)
    return dataclasses.replace(session, inference=inference, interface=Interface.of_session(inference))


def windows_of(ids: IntArray, length: int, number: int, seed: int) -> IntArray:
    """Return random windows [number, length] of tokens [all]."""
    starts = np.random.default_rng(seed).integers(0, max(1, len(ids) - length), number)
    return np.stack([ids[start : start + length] for start in starts])


def own_texts(session: Session, beginnings: IntArray, length: int, sampling: Sampling) -> IntArray:
    """Return the model's continuations of beginnings, [texts, length], without those that end before ``length``."""
    texts = []
    for start in range(0, len(beginnings), _ROWS):
        prompts = beginnings[start : start + _ROWS].tolist()
        for completion in generate(session, prompts, max_new_tokens=length - beginnings.shape[1], sampling=sampling):
            texts.append([*completion.prompt, *completion.tokens])
    return np.array([text for text in texts if len(text) == length], np.int64).reshape(-1, length)


def texts_of(session: Session, windows: IntArray) -> Texts:
    """Run windows of tokens [number, length], each by itself."""
    states = []
    for window in windows:
        past = session.interface.empty_past(1, len(window))
        feeds = session.interface.feeds(window[None], np.ones_like(window[None]), past)
        states.append(session.inference.run([HIDDEN], feeds)[0][0].astype(np.float16))
    return Texts(torch.from_numpy(windows), torch.from_numpy(np.stack(states)))


def loss_of(blocks: Blocks, lm_head: torch.Tensor, texts: Texts) -> torch.Tensor:
    """Return the mean cross entropy of the heads with the model's probabilities."""
    heads, states = blocks.inner.shape[1], texts.states.float()
    inputs, newest = states[:, :-heads], texts.tokens[:, 1 : states.shape[1] - heads + 1]
    head_states = blocks(inputs.flatten(0, 1), newest.flatten()).unflatten(0, inputs.shape[:2])
    with torch.no_grad():
        chances = (states[:, 1:].to(lm_head.dtype) @ lm_head).float().softmax(-1)
    loss = torch.zeros(())
    for head in range(heads):
        logits = (head_states[:, :, head].to(lm_head.dtype) @ lm_head).float()
        target = chances[:, head : head + inputs.shape[1]]
        loss = loss + torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(0, 1))
    return loss / heads


def accuracies(blocks: Blocks, lm_head: torch.Tensor, texts: Texts) -> list[float]:
    """Return how often each head's first choice is the model's, in these texts."""
    heads = blocks.inner.shape[1]
    shares = np.zeros(heads)
    with torch.no_grad():
        for tokens, states in zip(texts.tokens, texts.states.float(), strict=True):
            guesses = (blocks(states[:-heads], tokens[1 : len(tokens) - heads + 1]) @ lm_head).argmax(-1)
            model = (states @ lm_head).argmax(-1)
            for head in range(heads):
                shares[head] += (guesses[:, head] == model[1 + head : 1 + head + len(guesses)]).float().mean().item()
    return [round(float(share) / len(texts.tokens), 3) for share in shares]


def accuracy_sentence(blocks: Blocks, lm_head: torch.Tensor, held_out: list[Texts]) -> str:
    """Return a sentence on how often heads are right on held-out text, and on the model's own."""
    held_out_shares, own_shares = (accuracies(blocks, lm_head, texts) for texts in held_out)
    return f"right on held-out text {held_out_shares}, on what the model makes of its beginnings {own_shares}"


def main(
    folder: Annotated[Path, typer.Argument(help="an exported model")],
    output: Annotated[Path, typer.Option("-o", "--output", help="the file, or the folder of an artifact")],
    minutes: Annotated[float, typer.Option(help="how long to train")] = 14.0,
    heads: Annotated[int, typer.Option(min=1, max=11)] = 3,
    inner: Annotated[int | None, typer.Option(help="inner width of a head; by default that of the model")] = None,
    size: Annotated[int, typer.Option(help="of the heads' embedding of the newest token")] = 64,
    tokens: Annotated[int, typer.Option(help="tokens to train on")] = 600_000,
    own_share: Annotated[
        float, typer.Option("--own", min=0, max=1, help="share of them that the model writes itself")
    ] = 0.4,
    window: Annotated[int, typer.Option(help="tokens of a window")] = 256,
    text: Annotated[Path | None, typer.Option(help="a text to train on; by default Python's standard library")] = None,
    batch: Annotated[int, typer.Option(help="windows of a step")] = 6,
    rate: Annotated[float, typer.Option(help="the largest learning rate")] = 3e-3,
    bfloat16: Annotated[bool, typer.Option(help="multiply by the lm_head in bfloat16")] = True,
    only_here: Annotated[
        bool, typer.Option(help="leave out the columns by which other artifacts of the model can use the heads")
    ] = False,
    threads: int = 1,
    seed: int = 0,
) -> None:
    """Collect hidden states, train, and write; tells how often heads are right on held-out text."""
    torch.manual_seed(seed)
    torch.set_num_threads(threads)
    session = open_with_hidden(folder, threads)
    begin = time.perf_counter()
    if text is None:
        texts, test_text = list(training_texts().values()), held_out_text()
    else:
        full_text = text.read_text(encoding="utf-8")
        texts, test_text = [full_text[: len(full_text) * 9 // 10]], full_text[len(full_text) * 9 // 10 :]
    tokenizer = session.require_tokenizer()
    ids, held_out_ids = (
        np.array([token for encoding in tokenizer.encode_batch(part) for token in encoding.ids], np.int64)
        for part in (texts, [test_text])
    )
    number = tokens // window
    token_windows = [windows_of(ids, window, max(1, round(number * (1 - own_share))), seed)]
    for share, sampling in enumerate((GREEDY, Sampling(0.8, top_p=0.95, seed=seed))):
        beginnings = windows_of(ids, _BEGINNING, round(number * own_share / 2), seed + 1 + share)
        token_windows.append(own_texts(session, beginnings, window, sampling))
    trained_on = texts_of(session, np.concatenate(token_windows))
    judged_by = [windows_of(held_out_ids, window, _TEST_WINDOWS, seed)]
    judged_by.append(own_texts(session, judged_by[0][:, :_BEGINNING], window, GREEDY))
    held_out = [texts_of(session, windows) for windows in judged_by]
    matrix = lm_head_matrix(session)
    print(f"{trained_on.tokens.numel():,} states in {time.perf_counter() - begin:.0f} s", flush=True)

    lm_head = torch.from_numpy(matrix)
    cast = lm_head.bfloat16() if bfloat16 else lm_head
    blocks = Blocks(matrix.shape[0], heads, inner or matrix.shape[0], matrix.shape[1], size)
    optimizer = torch.optim.AdamW(blocks.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.0)
    print(f"untrained: {accuracy_sentence(blocks, lm_head, held_out)}", flush=True)
    train_begin, last_report, steps, loss = time.process_time(), 0.0, 0, torch.zeros(())
    while (progress := (time.process_time() - train_begin) / threads / (60 * minutes)) < 1:
        optimizer.param_groups[0]["lr"] = rate * min(progress / 0.02, 1.0, (1.0 - progress) / 0.7)
        loss = loss_of(blocks, cast, trained_on.sample(batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        if progress > last_report + 0.2:
            last_report = progress
            print(f"step {steps} loss {loss.item():.3f} {accuracy_sentence(blocks, lm_head, held_out)}", flush=True)
    print(f"{steps} steps, {steps * batch * window:,} positions: {accuracy_sentence(blocks, lm_head, held_out)}")

    column_tokens = np.sort(
        np.random.default_rng(seed).permutation(matrix.shape[1])[: 0 if only_here else 2 * matrix.shape[0]]
    )
    learnt = {name: value.detach().numpy() for name, value in blocks.named_parameters()}
    write(HeadsFile(**learnt, tokens=column_tokens, columns=matrix[:, column_tokens]), output)


def write(heads: HeadsFile, output: Path) -> None:
    """Write heads to a file; or into an artifact, with its manifest."""
    if not output.is_dir():
        return heads.write(output)
    file = output / HEADS
    heads.write(file)
    manifest = read_manifest(output)
    record = FileRecord(bytes=file.stat().st_size, sha256=hashlib.sha256(file.read_bytes()).hexdigest())
    new_manifest = manifest.model_copy(update={"files": {**manifest.files, HEADS: record}})
    (output / MANIFEST).write_text(new_manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return None


if __name__ == "__main__":
    typer.run(main)
