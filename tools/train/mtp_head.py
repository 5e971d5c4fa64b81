r"""Train a layer that predicts one more token, for a checkpoint that has none: it drafts with `--speculate mtp`.

    python tools/train/mtp_head.py graphopt/models/stdlib_lm -o with-head --minutes 3
    graphopt export with-head --mtp -o float32
    graphopt run float32 --prompt "def main(" --speculate mtp --stats

The layer is of the model's own kind, as in DeepSeek-V3 (arXiv:2412.19437, section 2.2), and is stored in the checkpoint
as theirs: `model.layers.N.*` after the last layer. It uses the model's embedding and lm_head, which do not change. It
learns the model's probabilities of the token after the next, on windows of the training text. The learning rate
follows processor time: a run takes ``--minutes`` on any machine.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from graphopt.models.mtp_head import module_class
from graphopt.util.stdlib_text import training_texts

_RATE = 2e-3


def loss_of(model: Any, head: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of a head with the model's probabilities, on tokens [windows, length]."""
    with torch.no_grad():
        states = model.model(ids).last_hidden_state
        chances = model.lm_head(states[:, 1:]).softmax(-1)
    positions = torch.arange(ids.shape[1] - 1)[None]
    logits = head(ids[:, 1:], states[:, :-1], position_ids=positions, use_cache=False).logits
    loss: torch.Tensor = -(chances * logits.log_softmax(-1)).sum(-1).mean()
    return loss


def main(
    checkpoint: Annotated[Path, typer.Argument(help="a folder of safetensors in one file, with a tokenizer.json")],
    output: Annotated[Path, typer.Option("-o", "--output", help="the checkpoint with its layer")],
    text: Annotated[Path | None, typer.Option(help="a file; Python's standard library without")] = None,
    minutes: Annotated[float, typer.Option(help="of the processor")] = 3.0,
    windows: Annotated[int, typer.Option(help="in a step")] = 8,
    length: Annotated[int, typer.Option(help="tokens of a window")] = 128,
    threads: Annotated[int, typer.Option(help="of torch")] = 1,
) -> None:
    """Train the layer and write the checkpoint."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval().requires_grad_(False)
    model.config.num_mtp_layers = 1
    layer = MtpModel(model, 1)
    head = module_class()(layer)
    parameters = list(layer.layers.parameters())
    for parameter in parameters:
        parameter.requires_grad_(True)
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    texts = list(training_texts().values()) if text is None else [text.read_text(encoding="utf-8")]
    ids = np.concatenate([encoding.ids for encoding in tokenizer.encode_batch(texts)])
    random, optimizer = np.random.default_rng(0), torch.optim.AdamW(parameters, lr=_RATE)
    begin, budget, step = time.process_time(), 60 * minutes, 0
    while (share := (time.process_time() - begin) / budget) < 1:
        for group in optimizer.param_groups:
            group["lr"] = _RATE * min(1.0, 20 * share, 1.05 - share)
        starts = random.integers(0, len(ids) - length, windows)
        loss = loss_of(model, head, torch.from_numpy(np.stack([ids[start : start + length] for start in starts])))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}, loss {loss.item():.3f}, {time.process_time() - begin:.0f} s", flush=True)
        step += 1
    shutil.copytree(checkpoint, output)
    model.config.save_pretrained(output)
    prefix, tensors = f"model.layers.{model.config.num_hidden_layers}", load_file(output / "model.safetensors")
    for name, value in layer.layers[0].state_dict().items():
        checkpoint_name = name.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
        tensors[f"{prefix}.{checkpoint_name}"] = value.to(torch.float16)
    save_file(tensors, output / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    typer.run(main)
