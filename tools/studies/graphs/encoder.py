"""The loss of an encoder by rounding and pruning of papers: all-MiniLM-L6-v2 in torch, with the values of codes.

An error is the norm of the difference of the hidden states of real tokens over their norm. Calibration and test read
different docstrings of Python's standard library.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from typing import TYPE_CHECKING, Any, TypeAlias

from tools.bench.padding import docstrings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

Tensor = Any
"""Of torch, which is imported where it is needed."""

Change: TypeAlias = "Callable[[str, Tensor], Tensor]"
"""From the name of a product and a tensor of it to the new tensor."""

TEXTS, LONGEST, GROUP = 16, 64, 64
BITS = (3, 4, 5, 6, 8)


def step_of(low: Tensor, high: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return the step between codes, and the code of zero, of ranges that hold zero."""
    low, high = low.clamp(max=0), high.clamp(min=0)
    step = ((high - low) / (2**bits - 1)).clamp(min=1e-12)
    return step, (-low / step).round()


def asymmetric(x: Tensor, bits: int, low: Tensor, high: Tensor) -> Tensor:
    """Return x rounded to codes of a range."""
    step, zero = step_of(low, high, bits)
    return ((x / step + zero).round().clamp(0, 2**bits - 1) - zero) * step


def symmetric(x: Tensor, bits: int, *, powers: bool = False) -> Tensor:
    """Return x rounded by scales from the largest of the last axis; ``powers``: by powers of two, the better one."""
    import torch

    largest = 2 ** (bits - 1) - 1
    scale = (x.abs().amax(-1, keepdim=True) / largest).clamp(min=1e-12)
    if not powers:
        return (x / scale).round().clamp(-largest, largest) * scale
    results = []
    for exponent in (scale.log2().ceil(), scale.log2().ceil() - 1):
        power = torch.exp2(exponent)
        results.append((x / power).round().clamp(-largest, largest) * power)
    errors = [(result - x).square().sum(-1, keepdim=True) for result in results]
    return torch.where(errors[0] <= errors[1], results[0], results[1])


def symmetric_groups(x: Tensor, bits: int, group: int = GROUP, *, powers: bool = False) -> Tensor:
    """Return the same of groups of the last axis."""
    return symmetric(x.reshape(*x.shape[:-1], -1, group), bits, powers=powers).reshape(x.shape)


def instance_groups(x: Tensor, bits: int, groups: int = 8) -> Tensor:
    """Return x rounded by ranges of groups of channels, grouped for each text by their own ranges (IGQ-ViT)."""
    import torch

    result = torch.empty_like(x)
    for row, text in zip(result, x, strict=True):
        order = (text.amax(0) - text.amin(0)).argsort()
        for part in order.chunk(groups):
            channels = text[:, part]
            row[:, part] = asymmetric(channels, bits, channels.min(), channels.max())
    return result


class Encoder:
    """A checkpoint with its texts.

    Args:
        folder: of the checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        import torch
        import transformers

        torch.set_num_threads(1)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.model: Any = transformers.AutoModel.from_pretrained(folder).eval()
        texts = list(itertools.islice((text for text in docstrings() if len(text) > 200), 2 * TEXTS))
        options = {"padding": True, "truncation": True, "max_length": LONGEST, "return_tensors": "pt"}
        self.calibration, self.test_batch = tokenizer(texts[:TEXTS], **options), tokenizer(texts[TEXTS:], **options)
        self.layers = {
            name: module
            for name, module in self.model.named_modules()
            if isinstance(module, torch.nn.Linear) and "pooler" not in name
        }
        self.weights = {name: layer.weight.detach().clone() for name, layer in self.layers.items()}
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        self.reference = self.run(self.test_batch)
        self.reference_of_calibration = self._calibrate()

    def run(self, batch: Any) -> Tensor:
        """Return the hidden states of real tokens, [tokens, width]."""
        import torch

        with torch.no_grad():
            return self.model(**batch).last_hidden_state[batch["attention_mask"].bool()]

    def _calibrate(self) -> Tensor:
        def keep(name: str) -> Callable[..., None]:
            def hook(module: Any, arguments: tuple[Tensor], output: Tensor) -> None:
                del module
                mask = self.calibration["attention_mask"].bool()
                self.inputs[name], self.outputs[name] = arguments[0][mask], output[mask]

            return hook

        hooks = [layer.register_forward_hook(keep(name)) for name, layer in self.layers.items()]
        result = self.run(self.calibration)
        for hook in hooks:
            hook.remove()
        return result

    def error(self, batch: Any = None) -> float:
        """Return the relative error of hidden states from those of the unchanged model."""
        reference = self.reference if batch is None else self.reference_of_calibration
        return float((self.run(self.test_batch if batch is None else batch) - reference).norm() / reference.norm())

    @contextlib.contextmanager
    def weights_as(self, change: Change) -> Iterator[None]:
        """Replace each matrix [out, in] by ``change`` of it in the block."""
        for name, layer in self.layers.items():
            layer.weight.data = change(name, self.weights[name])
        yield
        for name, layer in self.layers.items():
            layer.weight.data = self.weights[name]

    @contextlib.contextmanager
    def tensors_as(self, change: Change, *, outputs: bool = False) -> Iterator[None]:
        """Replace the input of each product, or with ``outputs`` its output, by ``change`` of it in the block."""

        def before(name: str) -> Callable[..., Tensor]:
            return lambda _, arguments: change(name, arguments[0])

        def after(name: str) -> Callable[..., Tensor]:
            return lambda *values: change(name, values[-1])

        hooks = [
            layer.register_forward_hook(after(name)) if outputs else layer.register_forward_pre_hook(before(name))
            for name, layer in self.layers.items()
        ]
        yield
        for hook in hooks:
            hook.remove()


def weights_of(bits: int, group: int = GROUP, *, powers: bool = False) -> Change:
    """Return a change that rounds weights."""
    return lambda _, weight: symmetric_groups(weight, bits, group, powers=powers)


def bimodal_keys(encoder: Encoder) -> Iterator[tuple[str, str, float]]:
    """PTQ4SAM (arXiv:2405.03144, section 3.2): keys with two peaks, whose channels are turned to one sign."""
    import torch

    keys = {name: output for name, output in encoder.outputs.items() if name.endswith("self.key")}
    signs = {name: torch.where(output.mean(0) < 0, -1.0, 1.0) for name, output in keys.items()}
    ranges = {name: (output.min(), output.max()) for name, output in keys.items()}
    one_sign_ranges = {name: ((keys[name] * signs[name]).min(), (keys[name] * signs[name]).max()) for name in keys}
    share = sum(float((output.mean(0).abs() > 2 * output.std(0)).float().mean()) for output in keys.values())
    yield "PTQ4SAM", f"floats; of {share / len(keys):.1%} of key channels the mean is beyond two deviations", 0.0
    heads = encoder.model.config.num_attention_heads

    def by_token(x: Tensor, bits: int) -> Tensor:
        rows = x.reshape(*x.shape[:-1], heads, -1)
        return asymmetric(rows, bits, rows.amin(-1, keepdim=True), rows.amax(-1, keepdim=True)).reshape(x.shape)

    def ways(bits: int) -> dict[str, Change]:
        def by_sign(name: str, x: Tensor) -> Tensor:
            return asymmetric(x * signs[name], bits, *one_sign_ranges[name]) * signs[name]

        return {
            "one range": lambda name, x: asymmetric(x, bits, *ranges[name]),
            "one range, split by sign": by_sign,
            "a range for each token and head": lambda _, x: by_token(x, bits),
        }

    def keys_only(change: Change) -> Change:
        return lambda name, x: change(name, x) if name in keys else x

    for bits in (8, 4):
        for way, change in ways(bits).items():
            with encoder.tensors_as(keys_only(change), outputs=True):
                yield "PTQ4SAM", f"keys of {bits} bits, {way}", encoder.error()


def ranges_by_group(encoder: Encoder) -> Iterator[tuple[str, str, float]]:
    """IGQ-ViT (arXiv:2404.00928) and Reg-PTQ (CVPR 2024): ranges of groups of channels of inputs of products."""
    fixed_ranges = {name: (x.min(), x.max()) for name, x in encoder.inputs.items()}
    blocks = {
        name: tuple(
            edge.repeat_interleave(GROUP)
            for edge in (x.amin(0).reshape(-1, GROUP).amin(-1), x.amax(0).reshape(-1, GROUP).amax(-1))
        )
        for name, x in encoder.inputs.items()
    }

    def ways(bits: int) -> dict[str, Change]:
        return {
            "one range": lambda name, x: asymmetric(x, bits, *fixed_ranges[name]),
            f"fixed ranges of {GROUP} channels (Reg-PTQ)": lambda name, x: asymmetric(x, bits, *blocks[name]),
            "8 groups of channels of each text, by their ranges (IGQ-ViT)": lambda _, x: instance_groups(x, bits),
            "a scale for each token": lambda _, x: symmetric(x, bits),
            f"a scale for each token and {GROUP} channels": lambda _, x: symmetric_groups(x, bits),
        }

    for bits in (8, 4):
        for way, change in ways(bits).items():
            with encoder.tensors_as(change):
                yield "IGQ-ViT, Reg-PTQ", f"inputs of {bits} bits, {way}", encoder.error()


def powers_of_two(encoder: Encoder) -> Iterator[tuple[str, str, float]]:
    """P2-ViT (arXiv:2405.19915): scales that are powers of two, of weights and of inputs of products."""
    for bits, group in ((8, 128), (4, GROUP)):
        for powers in (False, True):
            with encoder.weights_as(weights_of(bits, group, powers=powers)):
                size = bits + (8 if powers else 16) / group
                kind = "powers of two" if powers else "float16"
                yield "P2-ViT", f"int{bits} in groups of {group}, scales {kind}, {size:.3f} bits", encoder.error()

    def by_token(*, powers: bool) -> Change:
        return lambda _, x: symmetric(x, 8, powers=powers)

    for powers, kind in ((False, "floats"), (True, "powers of two")):
        with encoder.tensors_as(by_token(powers=powers)):
            yield "P2-ViT", f"inputs of 8 bits, scales of tokens {kind}", encoder.error()


def searched_bits(encoder: Encoder) -> Iterator[tuple[str, str, float]]:
    """BitsFusion (arXiv:2406.04333, section 3.2): bits of each layer by its own error, at the bytes of int4."""
    costs: dict[str, dict[int, float]] = {}

    def only(name: str, bits: int) -> Change:
        return lambda layer, weight: symmetric_groups(weight, bits) if layer == name else weight

    for name in encoder.layers:
        costs[name] = {}
        for bits in BITS:
            with encoder.weights_as(only(name, bits)):
                costs[name][bits] = encoder.error(encoder.calibration) ** 2
    sizes = {name: weight.numel() for name, weight in encoder.weights.items()}
    bits_by_layer, budget = dict.fromkeys(costs, BITS[0]), 4 * sum(sizes.values())

    def gain(name: str) -> float:
        bits = bits_by_layer[name]
        if bits == BITS[-1]:
            return -math.inf
        next_bits = BITS[BITS.index(bits) + 1]
        return (costs[name][bits] - costs[name][next_bits]) / (sizes[name] * (next_bits - bits))

    while True:
        bits_used = sum(bits_by_layer[name] * sizes[name] for name in bits_by_layer)
        affordable = [
            name
            for name in bits_by_layer
            if bits_by_layer[name] != BITS[-1]
            and bits_used + sizes[name] * (BITS[BITS.index(bits_by_layer[name]) + 1] - bits_by_layer[name]) <= budget
        ]
        if not affordable:
            break
        name = max(affordable, key=gain)
        bits_by_layer[name] = BITS[BITS.index(bits_by_layer[name]) + 1]

    def by_name(bits_of: Mapping[str, int]) -> Change:
        return lambda name, weight: symmetric_groups(weight, bits_of[name])

    for way, bits_of in (
        ("int4 everywhere", dict.fromkeys(bits_by_layer, 4)),
        ("bits of each matrix by its cost", bits_by_layer),
    ):
        mean = sum(bits_of[name] * sizes[name] for name in sizes) / sum(sizes.values())
        with encoder.weights_as(by_name(bits_of)):
            yield "BitsFusion", f"{way}, {mean + 16 / GROUP:.3f} bits", encoder.error()


def prune(encoder: Encoder) -> Iterator[tuple[str, str, float]]:
    """MULTIFLOW (arXiv:2404.05621): scores of a weight and of the two neurons that it joins; 2:4 and unstructured."""
    norms = {name: x.norm(dim=0) for name, x in encoder.inputs.items()}

    def flow(name: str, weight: Tensor) -> Tensor:
        signal = weight.abs() * norms[name]
        return weight.abs() * signal.mean(0, keepdim=True) * signal.mean(1, keepdim=True)

    scores: dict[str, Change] = {
        "magnitude": lambda _, weight: weight.abs(),
        "Wanda": lambda name, weight: weight.abs() * norms[name],
        "MULTIFLOW": flow,
    }

    def mask(score: Tensor, *, blocks: bool) -> Tensor:
        """Keep half of each row, or two of four neighbours."""
        rows = score.reshape(-1, 4) if blocks else score
        threshold = rows.kthvalue(rows.shape[-1] // 2, dim=-1, keepdim=True).values
        return (rows > threshold).reshape(score.shape)

    def without(score: Change, *, blocks: bool) -> Change:
        return lambda name, weight: weight * mask(score(name, weight), blocks=blocks)

    for blocks, kind in ((False, "half of each row"), (True, "2:4")):
        for method, score in scores.items():
            with encoder.weights_as(without(score, blocks=blocks)):
                yield "MULTIFLOW", f"{kind} by {method}", encoder.error()
    masks = {name: mask(scores["Wanda"](name, weight), blocks=True) for name, weight in encoder.weights.items()}
    with encoder.weights_as(weights_of(4)):
        yield "MULTIFLOW", "int4, nothing pruned, 4.25 bits", encoder.error()
    with encoder.weights_as(weights_of(3)):
        yield "MULTIFLOW", "int3, nothing pruned, 3.25 bits", encoder.error()
    with encoder.weights_as(lambda name, w: symmetric_groups(w * masks[name], 4)):
        yield "MULTIFLOW", "2:4 by Wanda, then int4, 3.25 bits with places", encoder.error()
    with encoder.weights_as(
        lambda name, w: symmetric_groups(w, 4) * mask(scores["Wanda"](name, symmetric_groups(w, 4)), blocks=True)
    ):
        yield "MULTIFLOW", "int4, then 2:4 by Wanda of what codes mean, 3.25 bits with places", encoder.error()


def rows(folder: Path) -> Iterator[str]:
    """Yield a row for each variant of each paper."""
    encoder = Encoder(folder)
    for method in (bimodal_keys, ranges_by_group, powers_of_two, prune, searched_bits):
        for paper, variant, error in method(encoder):
            yield f"| {paper} | {variant} | {error:.4f} |"
