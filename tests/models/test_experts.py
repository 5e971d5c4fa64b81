"""Mixtures that are spelled out expert by expert: the sorted form gives what the loop gives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from graphopt.analysis.structure.experts import mixtures_of
from graphopt.artifact.artifact import MODEL
from graphopt.models.recurrence import recurrences_as_nodes
from tests.families import HIDDEN, randomize

TOKENS, EXPERTS, TOP, INNER = 9, 4, 2, 32

# Sums of the same products in another order.
TOLERANCE = 1e-6


def routing(count: int) -> tuple[Any, Any]:
    """Return choices below ``count`` and weights of them, [tokens, top]; expert 1 is never chosen."""
    import torch

    random = np.random.default_rng(0)
    experts = [expert for expert in range(count) if expert != 1]
    choices = np.stack([random.permutation(experts)[:TOP] for _ in range(TOKENS)])
    return torch.from_numpy(choices), torch.from_numpy(random.random(choices.shape, np.float32))


def dbrx() -> tuple[Any, tuple[Any, ...]]:
    import torch
    from transformers.models.dbrx import modeling_dbrx
    from transformers.models.dbrx.configuration_dbrx import DbrxFFNConfig

    config = DbrxFFNConfig(hidden_size=HIDDEN, ffn_hidden_size=INNER, moe_num_experts=EXPERTS, moe_top_k=TOP)
    return modeling_dbrx.DbrxExperts(config), (torch.randn(1, TOKENS, HIDDEN), *routing(EXPERTS))


def longcat() -> tuple[Any, tuple[Any, ...]]:
    import torch
    from transformers.models.longcat_flash import LongcatFlashConfig, modeling_longcat_flash

    config = LongcatFlashConfig(
        hidden_size=HIDDEN, expert_ffn_hidden_size=INNER, n_routed_experts=EXPERTS, zero_expert_num=3
    )
    return modeling_longcat_flash.LongcatFlashExperts(config), (torch.randn(TOKENS, HIDDEN), *routing(EXPERTS + 3))


def jetmoe() -> tuple[Any, tuple[Any, ...]]:
    import torch
    from transformers.models.jetmoe import JetMoeConfig, modeling_jetmoe

    config = JetMoeConfig(
        hidden_size=HIDDEN, intermediate_size=INNER, num_local_experts=EXPERTS, num_experts_per_tok=TOP
    )
    return modeling_jetmoe.JetMoeMoE(config), (torch.randn(1, TOKENS, HIDDEN),)


@pytest.mark.parametrize("make", [dbrx, longcat, jetmoe])
def test_sorted_rows_give_what_the_loop_gives(make: Callable[[], tuple[Any, tuple[Any, ...]]]) -> None:
    import torch

    torch.manual_seed(0)
    module, inputs = make()
    randomize(module)
    with torch.no_grad():
        loop = module(*inputs)
        with recurrences_as_nodes():
            rows = module(*inputs)
    assert rows.shape == loop.shape
    assert (rows - loop).abs().max() <= TOLERANCE * loop.abs().max()


def test_an_exported_loop_is_a_mixture(make_artifact: Callable[[str], Path]) -> None:
    graph = ir.load(make_artifact("dbrx") / MODEL).graph
    mixtures = mixtures_of(graph)
    assert [len(mixture.products) for mixture in mixtures] == [EXPERTS] * 3
    assert all(mixture.bounds is not None for mixture in mixtures)
    assert not {"Loop", "Scan", "NonZero"} & set(Counter(node.op_type for node in graph))
