"""Small Llama checkpoints in the layouts of quantizers, and the numbers that each layout defines, written out here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file

HIDDEN, INNER, GROUP = 256, 384, 128

Tensors = dict[str, torch.Tensor]


class Quantized(NamedTuple):
    """A quantized layer.

    Attributes:
        tensors: by the ends of their names.
        matrix: what they mean, float32 [out, in].
        codes: integers [out, in].
        order: in which groups of columns lie side by side.
    """

    tensors: Tensors
    matrix: np.ndarray
    codes: np.ndarray
    order: np.ndarray


Quantizer = Callable[[np.random.Generator, tuple[int, int]], Quantized]


def packed_bits(codes: np.ndarray, bits: int, axis: int) -> torch.Tensor:
    """Return codes in int32, one behind the other along an axis, lowest bits first, spelled out bit by bit."""
    lines = np.moveaxis(codes, axis, -1).astype(np.uint64)
    words = np.zeros((*lines.shape[:-1], -(-lines.shape[-1] * bits // 32)), np.uint64)
    for place in range(lines.shape[-1]):
        for bit in range(bits):
            word, shift = divmod(place * bits + bit, 32)
            words[..., word] |= ((lines[..., place] >> np.uint64(bit)) & np.uint64(1)) << np.uint64(shift)
    array = np.ascontiguousarray(np.moveaxis(words.astype(np.uint32).view(np.int32), -1, axis))
    return torch.from_numpy(array)


def half_scales(random: np.random.Generator, shape: tuple[int, ...], bits: int) -> np.ndarray:
    """Return float16 scales with which random codes make weights of about 0.1."""
    return (random.uniform(0.5, 1.5, shape) * 0.2 / 2**bits).astype(np.float16)


def gptq(bits: int, *, symmetric: bool, shuffled: bool = False, version: int = 1) -> Quantizer:
    """Return the quantizer of GPTQ's layout, with groups shuffled as by the order of activations, or in order."""

    def quantize(random: np.random.Generator, shape: tuple[int, int]) -> Quantized:
        rows, columns = shape
        groups = columns // GROUP
        codes = random.integers(0, 2**bits, (columns, rows))
        points = np.full((groups, rows), 2 ** (bits - 1)) if symmetric else random.integers(1, 2**bits, (groups, rows))
        scales = half_scales(random, (groups, rows), bits)
        # the layers of a block read the same input, and have the same order
        order = np.random.default_rng(columns).permutation(columns) if shuffled else np.arange(columns)
        group_of = np.empty(columns, np.int32)
        group_of[order] = np.arange(columns) // GROUP
        matrix = (codes - points[group_of]).astype(np.float32) * scales[group_of].astype(np.float32)
        tensors = {
            ".qweight": packed_bits(codes, bits, 0),
            ".qzeros": packed_bits(points - (version == 1), bits, 1),
            ".scales": torch.from_numpy(scales),
            ".g_idx": torch.from_numpy(group_of),
        }
        return Quantized(tensors, matrix.T, codes.T, np.argsort(group_of, kind="stable"))

    return quantize


def awq(random: np.random.Generator, shape: tuple[int, int]) -> Quantized:
    """Quantize in AWQ's layout "gemm"."""
    rows, columns = shape
    groups = columns // GROUP
    codes, points = random.integers(0, 16, (columns, rows)), random.integers(0, 16, (groups, rows))
    scales = half_scales(random, (groups, rows), 4)

    def packed(numbers: np.ndarray) -> torch.Tensor:
        shuffled = np.concatenate([numbers[:, i::8][..., None] for i in (0, 2, 4, 6, 1, 3, 5, 7)], -1)
        return packed_bits(shuffled.reshape(len(numbers), -1), 4, 1)

    matrix = (codes - np.repeat(points, GROUP, 0)).astype(np.float32) * np.repeat(scales.astype(np.float32), GROUP, 0)
    tensors = {".qweight": packed(codes), ".qzeros": packed(points), ".scales": torch.from_numpy(scales)}
    return Quantized(tensors, matrix.T, codes.T, np.arange(columns))


def fp8(kind: str, name: str = ".weight_scale_inv", block: int = 128) -> Quantizer:
    """Return the quantizer of FP8 E4M3 with scales per ``tensor``, ``row`` or ``block``."""

    def quantize(random: np.random.Generator, shape: tuple[int, int]) -> Quantized:
        codes = torch.from_numpy(random.standard_normal(shape).astype(np.float32)).to(torch.float8_e4m3fn)
        counts = {"tensor": (), "row": (shape[0], 1), "block": (-(-shape[0] // block), -(-shape[1] // block))}[kind]
        scales = (random.uniform(0.5, 1.5, counts) * 0.05).astype(np.float32)
        spread = scales
        if kind == "block":
            spread = np.repeat(np.repeat(scales, block, 0), block, 1)[: shape[0], : shape[1]]
        matrix = codes.to(torch.float32).numpy() * spread
        tensors = {".weight": codes, name: torch.from_numpy(np.asarray(scales))}
        return Quantized(tensors, matrix, codes.view(torch.uint8).numpy(), np.arange(shape[1]))

    return quantize


def write_base(folder: Path) -> None:
    """Write a Llama of one layer in 16 bits."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = transformers.LlamaForCausalLM(config)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.1) if parameter.ndim > 1 else parameter.data.uniform_(0.5, 1.5)
    model.half().save_pretrained(folder)


def write_quantized(base: Path, folder: Path, quantize: Quantizer, settings: dict[str, Any]) -> dict[str, Quantized]:
    """Write the checkpoint ``base`` with all matrices of its layers quantized, and return these by name."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    tensors: Tensors = {}
    layers = {}
    for name, tensor in load_file(base / "model.safetensors").items():
        if name.endswith("proj.weight"):
            layer = name.removesuffix(".weight")
            layers[name] = quantize(random, tuple(tensor.shape))
            tensors |= {layer + part: array.contiguous() for part, array in layers[name].tensors.items()}
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((base / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return layers


def expected_logits(base: Path, layers: dict[str, Quantized], ids: np.ndarray) -> np.ndarray:
    """Return what transformers computes in float32 with the matrices of ``layers`` in place of those of ``base``."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    state = model.state_dict()
    with torch.no_grad():
        for name, layer in layers.items():
            state[name].copy_(torch.from_numpy(np.ascontiguousarray(layer.matrix)))
        logits: np.ndarray = model(input_ids=torch.tensor(ids)).logits.numpy()
    return logits
