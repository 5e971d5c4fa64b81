"""Small Llama checkpoints in the layouts of quantizers, and the numbers that each layout defines, written out here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from graphopt.numerics.formats import FORMATS

HIDDEN, INNER, GROUP = 256, 384, 128

Tensors = dict[str, torch.Tensor]


class QuantizedMatrix(NamedTuple):
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


Quantizer = Callable[[np.random.Generator, tuple[int, int]], QuantizedMatrix]


def packed_bits(codes: np.ndarray, bits: int, axis: int) -> torch.Tensor:
    """Return codes in int32, one behind the other along an axis, lowest bits first, spelled out bit by bit."""
    lines = np.moveaxis(codes, axis, -1).astype(np.uint64)
    words = np.zeros((*lines.shape[:-1], -(-lines.shape[-1] * bits // 32)), np.uint64)
    for position in range(lines.shape[-1]):
        for bit in range(bits):
            word, shift = divmod(position * bits + bit, 32)
            words[..., word] |= ((lines[..., position] >> np.uint64(bit)) & np.uint64(1)) << np.uint64(shift)
    array = np.ascontiguousarray(np.moveaxis(words.astype(np.uint32).view(np.int32), -1, axis))
    return torch.from_numpy(array)


def half_scales(random: np.random.Generator, shape: tuple[int, ...], bits: int) -> np.ndarray:
    """Return float16 scales with which random codes make weights of about 0.1."""
    return (random.uniform(0.5, 1.5, shape) * 0.2 / 2**bits).astype(np.float16)


def gptq(bits: int, *, symmetric: bool, act_order: bool = False, version: int = 1) -> Quantizer:
    """Return the quantizer of GPTQ's layout, with groups shuffled as by the order of activations, or in order."""

    def quantize(random: np.random.Generator, shape: tuple[int, int]) -> QuantizedMatrix:
        rows, columns = shape
        groups = columns // GROUP
        codes = random.integers(0, 2**bits, (columns, rows))
        points = np.full((groups, rows), 2 ** (bits - 1)) if symmetric else random.integers(1, 2**bits, (groups, rows))
        scales = half_scales(random, (groups, rows), bits)
        # the layers of a block read the same input, and have the same order
        order = np.random.default_rng(columns).permutation(columns) if act_order else np.arange(columns)
        group_of = np.empty(columns, np.int32)
        group_of[order] = np.arange(columns) // GROUP
        matrix = (codes - points[group_of]).astype(np.float32) * scales[group_of].astype(np.float32)
        tensors = {
            ".qweight": packed_bits(codes, bits, 0),
            ".qzeros": packed_bits(points - (version == 1), bits, 1),
            ".scales": torch.from_numpy(scales),
            ".g_idx": torch.from_numpy(group_of),
        }
        return QuantizedMatrix(tensors, matrix.T, codes.T, np.argsort(group_of, kind="stable"))

    return quantize


def awq(random: np.random.Generator, shape: tuple[int, int]) -> QuantizedMatrix:
    """Quantize in AWQ's layout "gemm"."""
    rows, columns = shape
    groups = columns // GROUP
    codes, points = random.integers(0, 16, (columns, rows)), random.integers(0, 16, (groups, rows))
    scales = half_scales(random, (groups, rows), 4)

    def pack(numbers: np.ndarray) -> torch.Tensor:
        interleaved_numbers = np.concatenate([numbers[:, i::8][..., None] for i in (0, 2, 4, 6, 1, 3, 5, 7)], -1)
        return packed_bits(interleaved_numbers.reshape(len(numbers), -1), 4, 1)

    matrix = (codes - np.repeat(points, GROUP, 0)).astype(np.float32) * np.repeat(scales.astype(np.float32), GROUP, 0)
    tensors = {".qweight": pack(codes), ".qzeros": pack(points), ".scales": torch.from_numpy(scales)}
    return QuantizedMatrix(tensors, matrix.T, codes.T, np.arange(columns))


def fp8(kind: str, name: str = ".weight_scale_inv", block: int = 128) -> Quantizer:
    """Return the quantizer of FP8 E4M3 with scales per ``tensor``, ``row`` or ``block``."""

    def quantize(random: np.random.Generator, shape: tuple[int, int]) -> QuantizedMatrix:
        codes = torch.from_numpy(random.standard_normal(shape).astype(np.float32)).to(torch.float8_e4m3fn)
        counts = {"tensor": (), "row": (shape[0], 1), "block": (-(-shape[0] // block), -(-shape[1] // block))}[kind]
        scales = (random.uniform(0.5, 1.5, counts) * 0.05).astype(np.float32)
        spread = scales
        if kind == "block":
            spread = np.repeat(np.repeat(scales, block, 0), block, 1)[: shape[0], : shape[1]]
        matrix = codes.to(torch.float32).numpy() * spread
        tensors = {".weight": codes, name: torch.from_numpy(np.asarray(scales))}
        return QuantizedMatrix(tensors, matrix, codes.view(torch.uint8).numpy(), np.arange(shape[1]))

    return quantize


def compressed_tensors(bits: int, *, symmetric: bool) -> Quantizer:
    """Return the quantizer of compressed-tensors' layout "pack-quantized"."""

    def quantize(random: np.random.Generator, shape: tuple[int, int]) -> QuantizedMatrix:
        groups = shape[1] // GROUP
        middle = 2 ** (bits - 1)
        codes = random.integers(-middle, middle, shape)
        points = (
            np.zeros((shape[0], groups), int) if symmetric else random.integers(-middle, middle, (shape[0], groups))
        )
        scales = half_scales(random, (shape[0], groups), bits)
        numbers = (codes - np.repeat(points, GROUP, 1)).astype(np.float32)
        tensors = {
            ".weight_packed": packed_bits(codes + middle, bits, 1),
            ".weight_scale": torch.from_numpy(scales),
            ".weight_shape": torch.tensor(shape),
        }
        if not symmetric:
            tensors[".weight_zero_point"] = packed_bits(points + middle, bits, 0)
        matrix = numbers * np.repeat(scales.astype(np.float32), GROUP, 1)
        return QuantizedMatrix(tensors, matrix, codes + middle, np.arange(shape[1]))

    return quantize


def int8_rows(random: np.random.Generator, shape: tuple[int, int]) -> QuantizedMatrix:
    """Quantize to int8 with a scale for each row, in compressed-tensors' layout "int-quantized"."""
    codes = random.integers(-128, 128, shape).astype(np.int8)
    scales = half_scales(random, (shape[0], 1), 8)
    tensors = {".weight": torch.from_numpy(codes), ".weight_scale": torch.from_numpy(scales)}
    return QuantizedMatrix(tensors, codes * scales.astype(np.float32), codes.view(np.uint8), np.arange(shape[1]))


FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def nvfp4(random: np.random.Generator, shape: tuple[int, int], *, is_modelopt: bool = True) -> QuantizedMatrix:
    """Quantize in NVFP4: E4M3 scales of groups of 16, which are multiplied (or divided) by one number."""
    codes = random.integers(0, 16, shape).astype(np.uint8)
    scales = torch.from_numpy(random.uniform(16, 400, (shape[0], shape[1] // 16))).to(torch.float8_e4m3fn)
    number = np.float32(1.7e-4 if is_modelopt else 5882.4)
    exact = scales.to(torch.float64).numpy()
    real = (exact * number if is_modelopt else exact / number).astype(np.float32)
    code_pairs = torch.from_numpy(codes[:, ::2] | codes[:, 1::2] << 4)
    if is_modelopt:
        tensors = {".weight": code_pairs, ".weight_scale": scales, ".weight_scale_2": torch.tensor(number)}
    else:
        tensors = {
            ".weight_packed": code_pairs,
            ".weight_scale": scales,
            ".weight_global_scale": torch.tensor([number]),
        }
    return QuantizedMatrix(tensors, FP4[codes] * np.repeat(real, 16, 1), codes, np.arange(shape[1]))


def bitsandbytes(kind: str, *, double_quant: bool) -> Quantizer:
    """Return the quantizer of bitsandbytes' 4 bits, with scales that are codes themselves or floats."""
    table = np.sort(np.random.default_rng(4).uniform(-1, 1, 16)).astype(np.float32)
    if kind == "nf4":
        table = FORMATS["nf4"].operands["table"]

    def quantize(random: np.random.Generator, shape: tuple[int, int]) -> QuantizedMatrix:
        codes = random.integers(0, 16, shape).astype(np.uint8)
        flat, blocks = codes.reshape(-1), codes.size // 64
        state = {"quant_type": kind, "blocksize": 64, "dtype": "float16", "shape": list(shape)}
        scales = random.uniform(0.1, 0.3, blocks).astype(np.float32)
        tensors = {".weight": torch.from_numpy((flat[::2] << 4 | flat[1::2])[:, None])}
        if double_quant:
            state |= {"nested_blocksize": 256, "nested_offset": 0.2, "nested_dtype": "float32"}
            scale_codes = random.integers(0, 256, blocks).astype(np.uint8)
            values = np.linspace(-1, 1, 256, dtype=np.float32)
            outer = random.uniform(0.05, 0.1, -(-blocks // 256)).astype(np.float32)
            scales = values[scale_codes] * outer[np.arange(blocks) // 256] + np.float32(0.2)
            tensors[".weight.nested_absmax"] = torch.from_numpy(outer)
            tensors[".weight.nested_quant_map"] = torch.from_numpy(values)
        tensors[".weight.absmax"] = torch.from_numpy(scale_codes if double_quant else scales)
        tensors[".weight.quant_map"] = torch.from_numpy(table.copy())
        octets = np.frombuffer(json.dumps(state).encode(), np.uint8).copy()
        tensors[f".weight.quant_state.bitsandbytes__{kind}"] = torch.from_numpy(octets)
        matrix = (table[flat].reshape(-1, 64) * scales[:, None]).reshape(shape)
        return QuantizedMatrix(tensors, matrix, codes, np.arange(shape[1]))

    return quantize


def bitsandbytes_int8(random: np.random.Generator, shape: tuple[int, int]) -> QuantizedMatrix:
    """Quantize as LLM.int8() does: each row by its largest magnitude."""
    codes = random.integers(-127, 128, shape).astype(np.int8)
    largest = random.uniform(0.2, 0.4, shape[0]).astype(np.float32)
    scales = (largest.astype(np.float64) / 127).astype(np.float32)
    tensors = {
        ".weight": torch.from_numpy(codes),
        ".SCB": torch.from_numpy(largest),
        ".weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    return QuantizedMatrix(tensors, codes * scales[:, None], codes.view(np.uint8), np.arange(shape[1]))


def exl3(bits: int, generator: str = "", *, signs_alone: bool = False) -> Quantizer:
    """Return the quantizer of ExLlamaV3's layout, of random codes, spelled out weight by weight."""

    def value(window: int) -> np.float16:
        if generator == "mul1":
            word = window * 0x83DCD12D % 2**32
            total = sum(word >> shift & 255 for shift in (0, 8, 16, 24))
            step, bias = (
                np.array(number, np.uint16).view(np.float16).astype(np.float64) for number in (0x1EEE, 0xC931)
            )
            return np.float16((total + 1024) * step + bias)
        word = window * 0xCBAC1FED if generator == "mcg" else window * 89226354 + 64248484
        word = word % 2**32 & 0x8FFF8FFF ^ 0x3B603B60
        low, high = (np.array(word >> shift & 0xFFFF, np.uint16).view(np.float16) for shift in (0, 16))
        return np.float16(low + high)

    values = np.array([value(window) for window in range(2**16)])

    def quantize(random: np.random.Generator, shape: tuple[int, int]) -> QuantizedMatrix:
        outputs, inputs = shape
        words = random.integers(0, 2**32, (inputs // 16, outputs // 16, 8 * bits), np.uint32)
        inner = np.zeros((inputs, outputs))
        for row, column in np.ndindex(words.shape[:2]):
            flags = "".join(f"{word:032b}" for word in words[row, column])
            ring_bits = flags[-16:] + flags
            for number in range(256):
                end = 16 + (number + 1) * bits
                lane, j = divmod(number, 8)
                r, c = lane % 4 * 2 + j % 2 + (8 if j & 2 else 0), lane // 4 + (8 if j & 4 else 0)
                inner[16 * row + r, 16 * column + c] = values[int(ring_bits[end - 16 : end], 2)]
        sides = []
        for size in (inputs, outputs):
            signs = random.choice([-1.0, 1.0], size)
            sides.append((signs if signs_alone else signs * random.uniform(0.1, 0.4, size)).astype(np.float16))
        rotation = np.array([[(-1) ** (i & j).bit_count() for i in range(128)] for j in range(128)]) / np.sqrt(128)
        left, right = (np.kron(np.eye(size // 128), rotation) for size in (inputs, outputs))
        matrix = sides[0].astype(np.float64)[:, None] * (left @ inner @ right) * sides[1].astype(np.float64)
        tensors = {".trellis": torch.from_numpy(words.view(np.int16))}
        for name, side in zip(("su", "sv"), sides, strict=True):
            sign_bits = np.packbits(side < 0, bitorder="little").view(np.int16)
            tensors |= (
                {f".{name}": torch.from_numpy(sign_bits)} if signs_alone else {f".{name}h": torch.from_numpy(side)}
            )
        if generator:
            factor = {"mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}[generator]
            tensors[f".{generator}"] = torch.tensor(factor - 2**32, dtype=torch.int32)
        return QuantizedMatrix(tensors, matrix.T, np.zeros(shape, np.uint8), np.arange(inputs))

    return quantize


def bitnet(random: np.random.Generator, shape: tuple[int, int]) -> QuantizedMatrix:
    """Quantize in BitNet's packing of transformers, with a scale that divides."""
    codes, quarter = random.integers(0, 3, shape).astype(np.uint8), shape[0] // 4
    octets = sum(codes[plane * quarter : (plane + 1) * quarter] << np.uint8(2 * plane) for plane in range(4))
    scale = np.float32(8)
    tensors = {".weight": torch.from_numpy(np.asarray(octets, np.uint8)), ".weight_scale": torch.tensor([scale])}
    return QuantizedMatrix(tensors, (codes.astype(np.float32) - 1) / scale, codes, np.arange(shape[1]))


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


def write_quantized(
    base: Path, folder: Path, quantize: Quantizer, settings: dict[str, Any]
) -> dict[str, QuantizedMatrix]:
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


def expected_logits(base: Path, layers: dict[str, QuantizedMatrix], ids: np.ndarray) -> np.ndarray:
    """Return what transformers computes in float32 with the matrices of ``layers`` in place of those of ``base``."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    state = model.state_dict()
    with torch.no_grad():
        for name, layer in layers.items():
            state[name].copy_(torch.from_numpy(np.ascontiguousarray(layer.matrix)))
        logits: np.ndarray = model(input_ids=torch.tensor(ids)).logits.numpy()
    return logits
