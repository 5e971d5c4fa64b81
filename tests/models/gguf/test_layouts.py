from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import modeling_gguf_pytorch_utils as theirs

from graphopt.graph.weights import Inline
from graphopt.models.gguf.layouts import LAYOUTS, FileTensor, joined_experts, layout_of

CONFIG = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "n_head": 4,
    "hidden_size": 24,
}
# Each name with the shape that the file has; what no rule of an architecture touches must stay as it is.
TENSORS = {
    "blk.0.attn_q.weight": (16, 24),
    "blk.0.attn_q.bias": (16,),
    "blk.1.attn_k.weight": (8, 24),
    "blk.1.attn_k.bias": (8,),
    "blk.0.attn_v.weight": (8, 24),
    "blk.0.attn_qkv.weight": (72, 24),
    "blk.0.attn_qkv.bias": (72,),
    "blk.0.attn_output.weight": (24, 24),
    "blk.0.ffn_up.weight": (48, 24),
    "blk.0.ffn_down.weight": (24, 48),
    "blk.0.ffn_norm.weight": (24,),
    "output_norm.weight": (24,),
    "blk.0.ffn_gate_inp_shexp.weight": (24,),
    "token_embd.weight": (30, 24),
}


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("architecture", LAYOUTS)
def test_a_layout_is_what_transformers_makes_of_it(architecture: str, name: str) -> None:
    array = np.random.default_rng(0).standard_normal(TENSORS[name]).astype(np.float32)
    processor = theirs.TENSOR_PROCESSORS[architecture](config=CONFIG)
    expected = processor.process(array.copy(), name, tensor_key_mapping={}, parsed_parameters={"tensors": {}}).weights
    layout = LAYOUTS[architecture](FileTensor(name, Inline.from_array(array), SimpleNamespace(**CONFIG)))
    assert layout.shape == expected.shape
    assert np.array_equal(layout.numpy(), expected)


def test_gates_come_before_ups_in_joined_experts() -> None:
    random = np.random.default_rng(0)
    names = ("blk.0.ffn_up_exps.weight", "blk.0.ffn_gate_exps.weight")
    arrays = {name: random.standard_normal((3, 4, 5)).astype(np.float32) for name in names}
    parameters: dict[str, dict[str, torch.Tensor]] = {"tensors": {}}
    keys = {name.removesuffix(".weight"): "experts.gate_up_proj" for name in names}
    processor = theirs.Qwen2MoeTensorProcessor()
    for name, array in arrays.items():
        processor.process(array, name, tensor_key_mapping=keys, parsed_parameters=parameters)
    experts = joined_experts({name: Inline.from_array(array) for name, array in arrays.items()})
    assert np.array_equal(experts.numpy(), parameters["tensors"]["experts.gate_up_proj"].numpy())


def test_only_two_different_parts_are_joined() -> None:
    part = Inline.from_array(np.zeros((3, 4, 5), np.float32))
    with pytest.raises(ValueError, match="blk.0.ffn_up_exps.weight"):
        joined_experts({"blk.0.ffn_up_exps.weight": part, "blk.1.ffn_up_exps.weight": part})


def test_an_architecture_with_a_processor_and_no_layout_is_not_guessed() -> None:
    assert layout_of("mamba") is None
    layout = layout_of("qwen2")
    part = Inline.from_array(np.zeros((3, 4), np.float32))
    assert layout is not None
    assert layout(FileTensor("blk.0.attn_q.weight", part, None)) is part
    # every processor that transformers has is either mirrored here or refused
    assert set(LAYOUTS) <= set(theirs.TENSOR_PROCESSORS)
