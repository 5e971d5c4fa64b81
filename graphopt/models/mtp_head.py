"""The head of a checkpoint that was trained to predict one more token (multi-token prediction), as a graph of its own.

DeepSeek-V3 (DeepSeek-AI, 2024, arXiv:2412.19437, section 2.2) and the families that followed it carry one more decoder
layer behind the last, which transformers leaves out when it loads a model for text:

    x_i = W [norm(e(t_{i+1})); norm(h_i)]        h_i: what the lm_head reads at position i; e: the embedding
    y_i = norm(layer(x_0 ... x_i))
    logits of t_{i+2} = lm_head(y_i)

The layer is built by transformers (``MtpModel``), which also knows the layouts in which checkpoints store it; embedding
and lm_head are those of the model. A second token is drafted by the same layer, with y_i in the place of h_{i+1}.
"""

from __future__ import annotations

import functools
import importlib
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from graphopt.analysis.structure.lm_head import lm_head_of
from graphopt.analysis.structure.ports import HIDDEN
from graphopt.errors import InputError
from graphopt.graph.diagnostics import Fact, Rule
from graphopt.graph.weights import new_weight
from graphopt.models.checkpoint import import_export_packages, quiet, reason_of
from graphopt.models.lazy_tensors import lazy_tensors
from graphopt.models.loading import LoadedModel, weights_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from graphopt.graph.weights import Expression

MORE_LAYERS = Rule(
    "export.mtp-layers", "the checkpoint has {count} layers that predict tokens, of which the first drafts"
)

_COUNT = "num_mtp_layers"
# What the layer of a head is where a configuration does not say: so it is in each checkpoint without these fields.
_TYPES = {"layer_types": "full_attention", "mlp_layer_types": "sparse"}
_COPIES = ("embed_tokens.weight", "shared_head.head.weight")  # copies of the model's own
_PREFIX = re.compile(r"(?:^|\.)mtp\.")
_LAYER = re.compile(r"^(?:model\.)?(?:language_model\.)?layers\.(\d+)\.")


def load_head(checkpoint: LoadedModel, source: str) -> LoadedModel:
    """Return the first head that predicts tokens of a checkpoint.

    Args:
        checkpoint: as from :func:`graphopt.models.loading.load`, before its model is traced.
        source: where it came from, for messages.

    Raises:
        InputError: the checkpoint has none, or one of a layout that transformers does not know, or it lacks weights.
    """
    tensors = _tensors_of_head(checkpoint, source)
    module = _build(checkpoint.model, tensors, source, evaluate=False)
    count = len({match[1] for name in tensors for match in [re.search(r"layers\.(\d+)\.", name)] if match})
    return LoadedModel(
        module,
        weights_of(module),
        lambda: _build(checkpoint.runnable(), tensors, source, evaluate=True),
        [MORE_LAYERS(count=count)] if count > 1 else [],
    )


def _tensors_of_head(checkpoint: LoadedModel, source: str) -> dict[str, Expression]:
    depth = checkpoint.model.config.get_text_config().num_hidden_layers

    def is_of_head(name: str) -> bool:
        match = _LAYER.match(name)
        return bool(_PREFIX.search(name)) or (match is not None and int(match[1]) >= depth)

    tensors = {name: tensor for name, tensor in (checkpoint.tensors or {}).items() if is_of_head(name)}
    if not tensors:
        raise InputError(
            "the checkpoint has no layer that predicts one more token (no tensor `mtp.*`, none of a layer "
            f"{depth} behind the last)",
            file=source,
            remedy="export it without --mtp, and draft with --speculate lookup or a smaller model",
        )
    return tensors


def _build(model: Any, tensors: Mapping[str, Expression], source: str, *, evaluate: bool) -> Any:
    """Return the head of a model as a module; its parameters are expressions unless they are evaluated."""
    torch, _ = import_export_packages()
    layers = importlib.import_module("transformers.modeling_layers")
    loading = importlib.import_module("transformers.core_model_loading")
    utils = importlib.import_module("transformers.modeling_utils")
    text_config = model.config.get_text_config()
    if getattr(text_config, _COUNT, None) is None:
        setattr(text_config, _COUNT, 1)
    for name, kind in _TYPES.items():
        if getattr(text_config, name, None) is not None and getattr(text_config, f"mtp_{name}", None) is None:
            setattr(text_config, f"mtp_{name}", [kind])
    weights = {name: tensor for name, tensor in tensors.items() if not name.endswith(_COPIES)}
    states = (
        {name: torch.from_numpy(tensor.numpy().astype(np.float32)) for name, tensor in weights.items()}
        if evaluate
        else lazy_tensors(weights)
    )
    with quiet():
        try:
            with torch.device("meta"):
                head = layers.MtpModel(model, 1)
            options = utils.LoadStateDictConfig(weight_mapping=head.get_weight_conversions(model), dtype=torch.float32)
            report, _ = loading.convert_and_load_state_dict_in_model(head, states, options)
            head.tie_with_main_model(model)
        except Exception as error:
            raise InputError(
                f"transformers cannot build the layer of {type(model).__name__} that predicts one more token "
                f"({reason_of(error)})",
                file=source,
                remedy="export it without --mtp, and draft with --speculate lookup",
            ) from error
    parameters = {name for name, _ in head.layers[0].named_parameters(prefix="layers.0")}
    missing = sorted(parameters & set(report.missing_keys))
    if missing:
        raise InputError(
            f"the checkpoint lacks {len(missing)} weight(s) of its layer that predicts one more token",
            file=source,
            tensor=missing[0],
            remedy="is its layout new to transformers? export it without --mtp, and draft with --speculate lookup",
        )
    return module_class()(head).eval()


@functools.cache
def module_class() -> Any:
    """Return the class of a head as a module that is called like a causal language model; torch is optional."""
    torch = importlib.import_module("torch")
    caches = importlib.import_module("transformers.cache_utils")
    masks = importlib.import_module("transformers.masking_utils")
    outputs = importlib.import_module("transformers.modeling_outputs")

    class Head(torch.nn.Module):  # type: ignore[name-defined, misc]
        """One layer of an ``MtpModel``."""

        def __init__(self, mtp: Any) -> None:
            super().__init__()
            self.mtp, self.config = mtp, mtp.config

        def forward(
            self,
            input_ids: Any,
            previous_hidden_state: Any,
            attention_mask: Any = None,
            position_ids: Any = None,
            past_key_values: Any = None,
            use_cache: bool = True,
        ) -> Any:
            """Return logits [batch, length, vocabulary] of the tokens behind the next, and the cache."""
            mtp = self.mtp
            if past_key_values is None and use_cache:
                past_key_values = caches.DynamicCache(config=self.config)
            embeddings = mtp.embed_tokens(input_ids)
            types = getattr(self.config, "layer_types", None)
            kind = types[0] if types else "full_attention"
            make_mask = masks.LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING.get(kind)
            mask = (masks.create_causal_mask if make_mask is None else make_mask)(
                config=self.config,
                inputs_embeds=embeddings,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                position_ids=position_ids,
            )
            rope = {"layer_type": kind} if mtp.has_per_layer_rope else {}
            angles = None if mtp.rotary_emb is None else mtp.rotary_emb(embeddings, position_ids=position_ids, **rope)
            hidden = mtp.layers[0](
                embeddings,
                previous_hidden_state,
                position_embeddings=angles,
                attention_mask=mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
            )
            if mtp.use_shared_post_norm:
                hidden = mtp.shared_post_norm(hidden)
            return outputs.CausalLMOutputWithPast(
                logits=mtp._project_to_logits(hidden), past_key_values=past_key_values
            )

    return Head


def give_hidden(program: ir.Model, source: str) -> None:
    """Let a graph give what its lm_head reads, in the basis that it has now, whatever passes do to it later.

    before::

        logits = MatMul(x, W)

    after::

        logits = MatMul(x, W)
        last_hidden_state = MatMul(x, I)                                      [batch, length, width]

    The head of another graph reads it, or the same head again. Where the norm in front loses its gain, or ``x`` turns,
    I takes that in as W does.

    Raises:
        InputError: no single product makes the logits.
    """
    graph = program.graph
    lm_head = lm_head_of(graph)
    if isinstance(lm_head, Fact):
        raise InputError(f"a head that drafts reads what the lm_head does: {lm_head}", file=source, tensor=HIDDEN)
    x = lm_head.inputs[0]
    assert x is not None and x.shape is not None
    width = x.shape[-1]
    assert isinstance(width, int)
    unit = new_weight(graph, f"{HIDDEN}.basis", ir.tensor(np.eye(width, dtype=np.float32)))
    node = ir.node("MatMul", [x, unit], name=HIDDEN)
    (output,) = node.outputs
    output.name, output.type, output.shape = HIDDEN, x.type, x.shape
    graph.insert_after(lm_head, node)
    graph.outputs.append(output)
