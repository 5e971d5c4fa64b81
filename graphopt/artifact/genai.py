"""The configuration by which onnxruntime-genai runs an artifact: ``genai_config.json``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graphopt.analysis.structure.ports import (
    ATTENTION_MASK,
    BLOCK_TABLE,
    ENCODER_STATES,
    FEATURE_INDEX,
    GROWING,
    IMAGE_FEATURES,
    IMAGE_GRID,
    INDEXER,
    INPUT_FEATURES,
    INPUT_IDS,
    INPUTS_EMBEDS,
    LOGITS,
    PAST_LENGTHS,
    PIXEL_VALUES,
    POSITION_IDS,
    RECURRENT,
    SCALES,
    STARTS,
    genai_cross_pattern,
    genai_pattern,
    past_port,
)
from graphopt.graph.diagnostics import Fact, Rule

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import onnx_ir as ir

    from graphopt.analysis.structure.ports import CachePort
    from graphopt.tasks.causal_lm.interface import Interface

GENAI_CONFIG = "genai_config.json"

MOST_REQUESTS, MOST_TOKENS = 16, 512
"""Requests that an engine runs at once, and tokens that it feeds in one call: a long prompt takes several."""

_FRAMES = 3000

_NO_HEADS = (1, 1)
"""Heads and head size of blocks that hold nothing, where all states are recurrent."""

_GROUP_KINDS = {"conv_state": "fixed_conv", "recurrent_state": "fixed_recurrent"}
"""What an engine calls states of which each request has a row."""

NO_BOUND = 1 << 20
"""Tokens of a text, at most, where the model states no bound, and all states are recurrent or the pool is the bound."""

CACHES_IN_PAGES = Rule(
    "genai.caches-in-pages",
    "its caches lie in pages that the caller allocates; --set lower.caches=growing leaves them as they are for ort-cpu",
)
TEXT_SOURCE = Rule("genai.text-source", "onnxruntime-genai runs no encoder-decoder with a text as its source")
FRAMES = Rule("genai.frames", "onnxruntime-genai takes recordings of 3000 frames, and the encoder takes {frames}")
NO_MASK = Rule("genai.no-mask", "the graph has no attention_mask input")
UNEVEN = Rule(
    "genai.layers-differ", "its layers differ in KV heads or head size, or are not numbered from 0", also=["layers"]
)
INDEXERS = Rule("genai.indexers", "its layers have keys of trained indexers, and onnxruntime-genai has no such cache")
OTHER_IMAGES = Rule(
    "genai.other-images",
    "its images come as {images}, its positions have {axes} axes, and onnxruntime-genai runs no model of both",
)
UNKNOWN = Rule(
    "genai.facts-unknown", "the number of positions, the token that ends a text or the vocabulary is not known"
)


def genai_config(
    interface: Interface,
    model_file: str,
    *,
    max_positions: int | None,
    bos_token_id: int | None,
    eos_token_ids: list[int],
    session: Mapping[str, str],
    pool: Mapping[str, int] | None = None,
) -> dict[str, Any] | Fact:
    """Return the configuration, or why onnxruntime-genai cannot run the graph.

    Args:
        interface: names and shapes of the graph.
        model_file: name of the ``.onnx`` file in the folder.
        max_positions: positions of the model.
        bos_token_id: the token that begins a text, if any.
        eos_token_ids: the tokens that end one.
        session: onnxruntime session entries that the artifact means.
        pool: of a graph whose requests share blocks, ``block_size`` and ``num_blocks``.
    """
    has_pool = interface.has_shared_pool
    # heads and head size: [batch, heads, length, size], or [blocks, tokens, heads, size]
    sizes = slice(2, 4) if has_pool else slice(1, None, 2)
    caches = [name for name in interface.past if (port := past_port(name)) is not None and port.part in GROWING]
    shapes = {interface.inputs[name].shape[sizes] for name in caches}
    ports = [port for name in interface.past if (port := past_port(name)) is not None]
    parts = [part for part in (*GROWING, *SCALES, *RECURRENT) if any(port.part == part for port in ports)]
    layers = max((port.layer for port in ports), default=-1) + 1
    if interface.has_pages:
        return CACHES_IN_PAGES()
    if ATTENTION_MASK not in interface.inputs and not has_pool:
        return NO_MASK()
    if any(port.part == INDEXER for port in ports):
        return INDEXERS()
    is_even = has_pool or _is_numbered(ports, layers)
    if len(shapes) > 1 or not is_even or any(port.part not in parts for port in ports):
        return UNEVEN(layers=layers)
    if max_positions is None and (has_pool or shapes <= {_NO_HEADS}):
        max_positions = NO_BOUND
    if max_positions is None or not eos_token_ids or interface.vocabulary is None:
        return UNKNOWN()
    heads, size = next(iter(shapes), _NO_HEADS)  # not read where all states are recurrent
    inputs, outputs = _port_names(interface, parts)
    decoder: dict[str, Any] = {
        # onnxruntime-genai passes keys that it does not know to onnxruntime as session entries.
        "session_options": {"log_id": "onnxruntime-genai", "provider_options": [], **session},
        "filename": model_file,
        "head_size": size,
        "num_key_value_heads": heads,
        "num_hidden_layers": layers,
        "inputs": inputs,
        "outputs": outputs,
    }
    if has_pool and not _is_numbered(ports, layers, recurrent=False):
        decoder["state_groups"] = _state_groups(ports)
    model = {
        "type": "decoder",
        "bos_token_id": eos_token_ids[0] if bos_token_id is None else bos_token_id,
        "eos_token_id": eos_token_ids,
        "pad_token_id": eos_token_ids[0],
        "context_length": max_positions,
        "vocab_size": interface.vocabulary,
        "decoder": decoder,
    }
    # The caches of the graph grow by copies; buffers shared between past and present would need another operator.
    search = {"do_sample": False, "max_length": max_positions, "past_present_share_buffer": False}
    if pool is None:
        return {"model": model, "search": search}
    batching = {**pool, "max_batch_size": MOST_REQUESTS, "max_scheduled_tokens": MOST_TOKENS}
    return {"model": model, "search": search, "engine": {"dynamic_batching": batching}}


def genai_speech_config(
    interface: Interface,
    model_file: str,
    encoder: ir.Graph,
    encoder_file: str,
    *,
    max_positions: int | None,
    bos_token_id: int | None,
    eos_token_ids: list[int],
    session: Mapping[str, str],
) -> dict[str, Any] | Fact:
    """Return the configuration of an encoder-decoder, or why onnxruntime-genai cannot run its graphs.

    Args:
        interface: names and shapes of the decoder.
        model_file: name of its ``.onnx`` file in the folder.
        encoder: the graph that reads the source.
        encoder_file: its file, relative to the folder.
        max_positions: as for :func:`genai_config`, and so are the others.
        bos_token_id: see there.
        eos_token_ids: see there.
        session: see there.
    """
    inputs = {value.name: value for value in encoder.inputs}
    outputs = {value.name: value for value in encoder.outputs}
    features, states = inputs.get(INPUT_FEATURES), outputs.get(ENCODER_STATES)
    if features is None or states is None or features.shape is None or states.shape is None:
        return TEXT_SOURCE()
    if features.shape[-1] != _FRAMES:
        return FRAMES(frames=str(features.shape[-1]))
    if interface.has_pages:
        return CACHES_IN_PAGES()
    if max_positions is None or not eos_token_ids or interface.vocabulary is None:
        return UNKNOWN()
    _, heads, _, size = interface.inputs[interface.past[0]].shape
    graph = {
        "session_options": {"log_id": "onnxruntime-genai", "provider_options": [], **session},
        "head_size": size,
        "hidden_size": int(str(states.shape[-1])),
        "num_attention_heads": heads,
        "num_hidden_layers": len(interface.past) // len(GROWING),
        "num_key_value_heads": heads,
    }
    cache_names, cross = [genai_pattern(part) for part in GROWING], [genai_cross_pattern(part) for part in GROWING]
    decoder = {
        **graph,
        "filename": model_file,
        "inputs": {
            "input_ids": INPUT_IDS,
            "past_key_names": cache_names[0][0],
            "past_value_names": cache_names[1][0],
            "cross_past_key_names": cross[0],
            "cross_past_value_names": cross[1],
        },
        "outputs": {"logits": LOGITS, "present_key_names": cache_names[0][1], "present_value_names": cache_names[1][1]},
    }
    reader = {
        **graph,
        "filename": encoder_file,
        "inputs": {"audio_features": INPUT_FEATURES},
        "outputs": {
            "encoder_hidden_states": ENCODER_STATES,
            "cross_present_key_names": cross[0],
            "cross_present_value_names": cross[1],
        },
    }
    model = {
        "type": "whisper",
        "bos_token_id": eos_token_ids[0] if bos_token_id is None else bos_token_id,
        "eos_token_id": eos_token_ids[0],
        "pad_token_id": eos_token_ids[0],
        "context_length": max_positions,
        "vocab_size": interface.vocabulary,
        "decoder": decoder,
        "encoder": reader,
    }
    search = {"do_sample": False, "max_length": max_positions, "num_beams": 1, "past_present_share_buffer": False}
    return {"model": model, "search": search}


def genai_images_config(
    interface: Interface,
    model_file: str,
    vision: ir.Graph,
    files: Mapping[str, str],
    *,
    image_token_id: int | None,
    start_token_id: int | None,
    **options: Any,
) -> dict[str, Any] | Fact:
    """Return the configuration of a vision-language model, or why onnxruntime-genai cannot run its graphs.

    Its type says how positions are counted and how often the vision tower runs: ``qwen2_5_vl`` along three axes, and
    once for each image; ``gemma3`` along one axis, and once for all tiles.

    Args:
        interface: names and shapes of the decoder.
        model_file: name of its ``.onnx`` file in the folder.
        vision: the graph that makes features of images.
        files: the files of the graphs ``vision`` and ``embedding``, relative to the folder.
        image_token_id: the token whose places features of images take.
        start_token_id: the token in front of those, by which images are found where positions have three axes.
        options: as for :func:`genai_config`.
    """
    config = genai_config(interface, model_file, **options)
    if isinstance(config, Fact):
        return config
    has_axes = len(interface.inputs[POSITION_IDS].shape if POSITION_IDS in interface.inputs else ()) == 3
    inputs = [value.name for value in vision.inputs]
    if image_token_id is None or (has_axes and start_token_id is None):
        return UNKNOWN()
    images = "patches" if IMAGE_GRID in inputs else "tiles in an order" if FEATURE_INDEX in inputs else "tiles"
    if has_axes != (IMAGE_GRID in inputs) or FEATURE_INDEX in inputs:
        return OTHER_IMAGES(images=images, axes=3 if has_axes else 1)
    model = config["model"]
    options_of_session = {"session_options": model["decoder"]["session_options"]}
    model |= {
        "type": "qwen2_5_vl" if has_axes else "gemma3",
        "image_token_id": image_token_id,
        **({"vision_start_token_id": start_token_id} if has_axes else {}),
        "embedding": {
            **options_of_session,
            "filename": files["embedding"],
            "inputs": {name: name for name in (INPUT_IDS, IMAGE_FEATURES)},
            "outputs": {INPUTS_EMBEDS: INPUTS_EMBEDS},
        },
        "vision": {
            **options_of_session,
            "filename": files["vision"],
            "config_filename": "processor_config.json",
            "inputs": {name: name for name in (PIXEL_VALUES, IMAGE_GRID) if name in inputs},
            "outputs": {IMAGE_FEATURES: IMAGE_FEATURES},
        },
    }
    model["decoder"]["hidden_size"] = interface.inputs[INPUTS_EMBEDS].shape[-1]
    return config


def _is_numbered(ports: Sequence[CachePort], layers: int, *, recurrent: bool = True) -> bool:
    """Return whether each layer has a state, and those that have keys and values have all parts of these.

    ``recurrent`` says whether a layer may have recurrent states, beside them or instead.
    """
    parts = [{port.part for port in ports if port.layer == layer} for layer in range(layers)]
    beside_growing = set(RECURRENT) if recurrent else set()
    growing = {port.part for port in ports} - set(RECURRENT)
    growing_parts = (growing, set()) if recurrent else (growing,)
    return bool(ports) and all(layer and layer - beside_growing in growing_parts for layer in parts)


def _state_groups(ports: Sequence[CachePort]) -> list[dict[str, Any]]:
    """Return which layers have which kind of state."""
    kinds: dict[str, set[int]] = {}
    for port in ports:
        kinds.setdefault(_GROUP_KINDS.get(port.part, "paged_kv"), set()).add(port.layer)
    return [{"kind": kind, "layer_ids": sorted(layers)} for kind, layers in kinds.items()]


def _port_names(interface: Interface, parts: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the names of inputs and outputs, by what onnxruntime-genai calls them."""
    patterns = {part: genai_pattern(part) for part in parts}
    input_names = (INPUT_IDS, INPUTS_EMBEDS, ATTENTION_MASK, POSITION_IDS, STARTS, PAST_LENGTHS, BLOCK_TABLE)
    inputs = {name: name for name in input_names if name in interface.inputs}
    kinds = {part: part.removesuffix("_state") for part in parts}
    inputs |= {f"past_{kinds[part]}_names": pattern[0] for part, pattern in patterns.items()}
    outputs = {f"present_{kinds[part]}_names": pattern[1] for part, pattern in patterns.items()}
    return inputs, {LOGITS: LOGITS} | outputs
