"""Rotary scaling of a GGUF file, which transformers leaves out when it reads one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graphopt.errors import InputError

if TYPE_CHECKING:
    from graphopt.quantization.gguf.file import GgufFile

FREQUENCIES = "rope_freqs.weight"
"""A tensor of Llama 3.1 and later, float32 [d/2]: what each rotary frequency is divided by."""


def rope_parameters(file: GgufFile) -> dict[str, Any]:
    """Return what a configuration of transformers must say about rotary scaling; empty where there is none.

    Raises:
        InputError: the kind of scaling is unknown.
    """
    kind = file.value("rope.scaling.type", "none")
    factor = file.value("rope.scaling.factor", file.value("rope.scale_linear"))
    original = file.value("rope.scaling.original_context_length")
    if kind == "none" and file.value("rope.scale_linear") in (None, 1.0):
        return {}
    if factor is not None and kind in ("linear", "none"):
        return {"rope_type": "linear", "factor": factor}
    if factor is not None and kind == "yarn" and original is not None:
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise InputError(
        f"rotary scaling of the type {kind} (factor {factor}, original context {original}) cannot be translated",
        file=file.path,
        remedy="graphopt knows none, linear, and yarn with its original context; export the original checkpoint",
    )


def apply_frequencies(model: Any, file: GgufFile) -> None:
    """Divide the rotary frequencies of a model by the file's factors, in place.

    Raises:
        InputError: the model has no such frequencies, or another number of them.
    """
    factors = file.tensors[FREQUENCIES].numpy()
    buffers = [buffer for name, buffer in model.named_buffers() if name.endswith("rotary_emb.inv_freq")]
    if not buffers or any(tuple(buffer.shape) != factors.shape for buffer in buffers):
        raise InputError(
            f"{type(model).__name__} has no {factors.size} rotary frequencies to scale",
            file=file.path,
            tensor=FREQUENCIES,
            shape=factors.shape,
        )
    for buffer in buffers:
        buffer.div_(buffer.new_tensor(factors))
