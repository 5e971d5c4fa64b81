"""Graphs that skip tokens: Mixture-of-Depths (arXiv:2404.02258) and MrT5's deletion gate (arXiv:2410.20771).

Small transformers of random weights are written in torch, exported, and timed beside the same layers without skipping:
skipped tokens must not be computed. Gates are random too, so outputs mean nothing; the number of tokens that pass is
set here.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import graphopt
from graphopt.ort.session import open_session

if TYPE_CHECKING:
    from collections.abc import Iterator

WIDTH, HEADS, LAYERS, TOKENS, SHARE = 256, 4, 4, 512, 8
"""In Mixture-of-Depths one token of :data:`SHARE` passes every other layer; in MrT5, all layers after the first."""


def modules() -> dict[str, Any]:  # noqa: C901, classes of torch, which is imported here alone
    """Return modules of torch by name: float32 [1, tokens, width] to [1, tokens that are left, width]."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.norm_of_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            parts = self.qkv(self.norm(x)).reshape(1, -1, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
            attention = nn.functional.scaled_dot_product_attention(parts[0], parts[1], parts[2])
            x = x + self.out(attention.transpose(1, 2).reshape(1, -1, WIDTH))
            x = x + self.down(nn.functional.gelu(self.up(self.norm_of_mlp(x))))
            return x

    class Full(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    class Depths(Full):
        """Every other layer reads the tokens that its router scores highest, and adds its output times the score."""

        def __init__(self) -> None:
            super().__init__()
            self.routers = nn.ModuleList(nn.Linear(WIDTH, 1) for _ in range(LAYERS))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for number, (block, router) in enumerate(zip(self.blocks, self.routers, strict=True)):
                if number % 2 == 0:
                    x = block(x)
                    continue
                scores = router(x)[0, :, 0]
                indices = torch.topk(scores, TOKENS // SHARE).indices.sort().values
                selection = x[:, indices]
                update = (block(selection) - selection) * torch.sigmoid(scores[indices])[None, :, None]
                x = x.index_add(1, indices, update)
            return x

    class Deletion(Full):
        """After the first layer a gate deletes tokens; later layers read only the remaining ones."""

        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(WIDTH, 1)
            self.register_buffer("bound", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.blocks[0](x)
            remaining = torch.nonzero(self.gate(x)[0, :, 0] > self.bound)[:, 0]
            torch._check(remaining.shape[0] > 1)
            x = x[:, remaining]
            for block in list(self.blocks)[1:]:
                x = block(x)
            return x

    torch.manual_seed(0)
    kinds = {"all tokens in all layers": Full(), "Mixture-of-Depths": Depths(), "MrT5": Deletion()}
    return {name: module.eval() for name, module in kinds.items()}


def rows(recipes: tuple[str, ...], rounds: int) -> Iterator[str]:
    """Yield a row for each module and recipe: remaining tokens, time of a run, change of the output by the recipe."""
    import torch

    x = torch.from_numpy(np.random.default_rng(0).standard_normal((1, TOKENS, WIDTH)).astype(np.float32))
    sessions, changes, tokens_left = {}, {}, {}
    with tempfile.TemporaryDirectory() as temporary:
        for name, module in modules().items():
            if name == "MrT5":
                with torch.no_grad():
                    scores = module.gate(module.blocks[0](x))[0, :, 0]
                    module.bound.fill_(float(scores.topk(TOKENS // SHARE + 1).values[-2:].mean()))
            file = Path(temporary) / f"{name.replace(' ', '-')}.onnx"
            with torch.no_grad():
                reference = module(x).numpy()
                torch.onnx.export(module, (x,), file, dynamo=True, opset_version=23, input_names=["x"], verbose=False)
            for recipe in ("as exported", *recipes):
                entries = {}
                if recipe != "as exported":
                    folder = file.with_suffix(f".{recipe}")
                    artifact = graphopt.optimize(file, recipe, folder, target="ort-cpu", quality_tokens=0)
                    entries, path = artifact.manifest.session, folder / "model.onnx"
                else:
                    path = file
                session = open_session(path, threads=1, entries=entries)
                result = session.run(None, {"x": x.numpy()})[0]
                sessions[name, recipe], tokens_left[name, recipe] = session, result.shape[1]
                has_same_shape = result.shape == reference.shape
                change = np.linalg.norm(result - reference) / np.linalg.norm(reference) if has_same_shape else np.nan
                changes[name, recipe] = float(change)
        samples: dict[tuple[str, str], list[float]] = {key: [] for key in sessions}
        for _ in range(rounds):
            for key, session in sessions.items():
                start = time.process_time()
                session.run(None, {"x": x.numpy()})
                samples[key].append(time.process_time() - start)
    for (name, recipe), times in samples.items():
        full_seconds = min(samples["all tokens in all layers", recipe])
        figures = f"{tokens_left[name, recipe]} | {min(times) * 1e3:.1f} | {full_seconds / min(times):.2f}"
        yield f"| {name}, {recipe} | {figures} | {changes[name, recipe]:.1e} |"
