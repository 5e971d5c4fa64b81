"""Checkpoints of AutoRound, in the layouts of GPTQ or AWQ (Cheng et al. 2024, arXiv:2309.05516)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphopt.quantization.checkpoints import awq, gptq
from graphopt.quantization.checkpoints.importer import Importer, Layer

if TYPE_CHECKING:
    from graphopt.graph.weights import Expression

_GPTQ = ("auto_round:auto_gptq", "auto_round:gptq", "auto_gptq", "auto_round")
_AWQ = ("auto_round:auto_awq", "auto_round:awq", "auto_awq")


def matrix_of(layer: Layer) -> Expression:
    """Return the matrix of a layer, [N, K].

    Raises:
        InputError: a tensor is missing or does not fit, or a setting is unknown.
    """
    is_awq = layer.choice("packing_format", "auto_round:auto_gptq", (*_GPTQ, *_AWQ)) in _AWQ
    return awq.matrix_of(layer) if is_awq else gptq.matrix_of(layer)


AUTOROUND = Importer("auto-round", (".qweight",), (".qzeros", ".scales", ".g_idx"), matrix_of)
