"""Checkpoints with a layer that predicts one more token, in the layouts that DeepSeek-V3 and Qwen3-Next publish."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.checkpoints import save_tokenizer
from tests.families import make_model, randomize

if TYPE_CHECKING:
    from pathlib import Path

_QWEN = {
    "enorm.weight": "pre_fc_norm_embedding.weight",
    "hnorm.weight": "pre_fc_norm_hidden.weight",
    "eh_proj.weight": "fc.weight",
    "post_norm.weight": "norm.weight",
}


def write_mtp_checkpoint(folder: Path, family: str, share: float = 1.0) -> Any:
    """Write a checkpoint with random weights, and return its layer as a module of transformers.

    Args:
        folder: where to.
        family: ``deepseek_v3`` or ``qwen3_next``.
        share: of what attention and experts add to the residual. At 0 the token behind one is known from that alone,
            and the layer, which then looks at the token and at no state, guesses it.
    """
    import torch
    from safetensors.torch import load_file, save_file
    from transformers.modeling_layers import MtpModel

    model = make_model(family, 1)
    if family == "qwen3_next":
        model.config.num_mtp_layers, model.config.mtp_layer_types = 1, ["full_attention"]
    head = MtpModel(model, 1)
    randomize(head.layers)
    if share < 1:
        _weaken(model, share)
        _weaken(head.layers, share)
        with torch.no_grad():
            width = head.layers[0].enorm.weight.numel()
            head.layers[0].eh_proj.weight.copy_(torch.eye(2 * width)[:width])
    save_tokenizer(folder)
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = (pair for item in head.layers[0].state_dict().items() for pair in _published_tensors(family, *item))
    save_file(load_file(file) | dict(tensors), file, metadata={"format": "pt"})
    return head


def _weaken(module: Any, share: float) -> None:
    import torch

    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter.mul_(share)
            elif "norm" in name:
                parameter.fill_(1.0)


def _published_tensors(family: str, name: str, value: Any) -> list[tuple[str, Any]]:
    """Return under which names a tensor of the layer is published, with its parts."""
    inner = name.removeprefix("mtp_block.")
    if family == "qwen3_next":
        return [(f"mtp.{_QWEN.get(name, f'layers.0.{inner}')}", value)]
    prefix = f"model.layers.1.{inner.replace('post_norm', 'shared_head.norm')}"
    if name.endswith("experts.gate_up_proj"):
        names = (f"{number}.{part}" for number in range(len(value)) for part in ("gate_proj", "up_proj"))
        matrices = [matrix.contiguous() for expert in value for matrix in expert.chunk(2)]
    elif name.endswith("experts.down_proj"):
        names = (f"{number}.down_proj" for number in range(len(value)))
        matrices = [matrix.contiguous() for matrix in value]
    else:
        return [(prefix, value)]
    experts = prefix.rpartition(".")[0]
    return [(f"{experts}.{part}.weight", matrix) for part, matrix in zip(names, matrices, strict=True)]
