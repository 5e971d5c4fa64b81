"""Kinds of layers are found by what a model of transformers computes, on models that have no weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from graphopt.models.checkpoint import quiet
from graphopt.models.trace import task_of_model
from graphopt.models.unrolling.kinds import Plan, index_attributes, plan_layers, shorten
from graphopt.models.unrolling.refusals import NotUnderstoodError
from graphopt.models.unrolling.skeleton import make_skeleton
from tests.families import FAMILIES

LAYERS = 6


def skeleton(family: str, layers: int = LAYERS, **settings: Any) -> Any:
    name, settings_of_family = FAMILIES[family]
    count = {key: layers for key in ("num_hidden_layers", "n_layer") if key in settings_of_family}
    config = getattr(transformers, name)(**{**settings_of_family, **count, **settings})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    make_skeleton(model)
    return model


def plan_of(model: Any) -> Plan:
    with quiet():
        return plan_layers(model, task_of_model(model).sample(model))


def why_not(model: Any) -> str:
    with pytest.raises(NotUnderstoodError) as caught:
        plan_of(model)
    return str(caught.value)


@pytest.mark.parametrize(("family", "prefix"), [("llama", "model.layers"), ("gpt2", "transformer.h")])
def test_equal_layers_are_of_one_kind(family: str, prefix: str) -> None:
    assert plan_of(skeleton(family)) == Plan(prefix, (0,) * LAYERS, (0, 1))


def test_layers_with_and_without_a_window() -> None:
    types = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    plan = plan_of(skeleton("gemma3", layer_types=types))
    assert (plan.kinds, plan.samples) == ((0, 0, 1, 0, 0, 1), (0, 1, 2, 5))


def test_dense_layers_before_those_with_experts() -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [0, 3]}
    config = transformers.Qwen3MoeConfig(num_hidden_layers=LAYERS, **sizes, **heads, **experts)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    make_skeleton(model)
    plan = plan_of(model)
    assert (plan.kinds, plan.samples) == ((0, 1, 1, 0, 1, 1), (0, 1, 2, 3))


def test_layers_that_compute_with_their_number_are_all_different() -> None:
    model = skeleton("gpt2", scale_attn_by_inverse_layer_idx=True)
    assert "6 of its 6 layers would be traced" in why_not(model)


def test_a_layer_that_reads_another_but_the_last_is_not_understood() -> None:
    model = skeleton("llama")
    first_input: list[Any] = []

    def keep(module: Any, args: Any) -> None:
        first_input[:] = [args[0]]

    def add(module: Any, args: Any, output: Any) -> Any:
        return output + first_input[0]

    model.model.layers[1].register_forward_pre_hook(keep)
    model.model.layers[4].mlp.register_forward_hook(add)
    assert "layer 4 reads more than what the layer before passes on" in why_not(model)


def test_a_model_that_branches_on_numbers_is_not_understood() -> None:
    model = skeleton("llama")
    model.model.layers[2].register_forward_pre_hook(lambda module, args: bool(args[0].sum() > 0) and None)
    assert "it cannot be run without weights" in why_not(model)


def test_few_layers_are_all_traced() -> None:
    assert "3 of its 3 layers" in why_not(skeleton("llama", 3))


def test_a_shortened_model_is_restored() -> None:
    types = ["sliding_attention", "full_attention"] * 3
    model = skeleton("gemma3", layer_types=types)
    layers = list(model.model.layers)
    with shorten(model, Plan("model.layers", (0, 1) * 3, (0, 1, 2, 5))):
        assert list(model.model.layers) == [layers[0], layers[1], layers[2], layers[5]]
        assert [layer.self_attn.layer_idx for layer in model.model.layers] == [0, 1, 2, 3]
        assert model.config.num_hidden_layers == 4
        assert model.config.layer_types == [types[0], types[1], types[2], types[5]]
    assert list(model.model.layers) == layers
    assert [layer.self_attn.layer_idx for layer in layers] == list(range(LAYERS))
    assert (model.config.num_hidden_layers, model.config.layer_types) == (LAYERS, types)


def test_a_skeleton_keeps_what_a_model_computes_for_itself() -> None:
    config = transformers.LlamaConfig(**FAMILIES["llama"][1])
    model = transformers.AutoModelForCausalLM.from_config(config)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    make_skeleton(model)
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    gains = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    assert len({tuple(gain.tolist()) for gain in gains}) == len(gains)


def test_the_number_of_a_layer_stands_in_modules_that_not_all_layers_have() -> None:
    layers = []
    for number, name in enumerate(["conv", "conv", "attention", "conv"]):
        layer, part = torch.nn.Module(), torch.nn.Module()
        part.layer_idx, part.width, part.second = number, 3, 2
        layer.add_module(name, part)
        layers.append(layer)
    # "second" is 2 in the only layer with attention, and numbers no other; "width" is 3 in the last and elsewhere
    assert index_attributes(layers) == {("conv", "layer_idx"), ("attention", "layer_idx")}
