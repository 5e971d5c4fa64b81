"""Try every causal language model that transformers knows: two layers, random weights, through export and recipes.

    python tools/studies/all_families.py --results families.jsonl                  # an hour; goes on where it stopped
    python tools/studies/all_families.py --results families.jsonl --only qwen3,olmo3 --recipes rotate,int4-rtn
    python tools/studies/all_families.py --results uses.jsonl --recipes small-rtn --uses verify,drafts,serve

Each family runs in a process of its own, with a limit of time. A row is written when its family ends, and a family that
has a row is not tried again. A configuration is made small by setting :data:`SIZES` under the names that it and its
parts have for them.
"""

from __future__ import annotations

import functools
import json
import math
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

# Run as a script, Python looks for modules in tools/ only.
sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.families import randomize
from tools.bench.parts.drafting import OracleProposer

RECIPES = ("rotate", "int4-rtn", "small-rtn", "rotate-kv4-rtn", "w4a8-rtn")
"""One recipe for each kind of rewrite: rotations, onnxruntime's products, ours, caches, inputs in codes."""

TOKENS = 24
"""New tokens of a text where drafts and requests are tried."""

SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "n_embd": 64,
    "d_model": 64,
    "dim": 64,
    "num_hidden_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "num_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "n_inner": 96,
    "ffn_dim": 96,
    "ffn_hidden_size": 96,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "max_position_embeddings": 128,
    "n_positions": 128,
    "n_ctx": 128,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "word_embed_proj_dim": 64,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "index_head_dim": 16,
    "index_n_heads": 4,
    "index_topk": 16,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "state_size": 16,
    "sliding_window": 32,
    "vocab_size_per_layer_input": 320,
    "hidden_size_per_layer_input": 16,
}
"""Sizes of a small model, by the names that configurations have for them."""

BOUND = 1e-5
"""The largest difference of logits from those of transformers, relative to the largest logit."""

CHUNKS = (7, 11, 1, 1)
"""Tokens of each call: a prompt, a chunk, and single steps."""

SERVER = multiprocessing.get_context("forkserver")
"""Imports once what every family needs: imports take half of the time of a small export."""

EXTRA_SETTINGS: dict[str, dict[str, Any]] = {
    # two layers of which a third and a fourth reuse keys and values
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "intermediate_size": [96] * 4,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
        "laurel_rank": 8,
    },
    "gemma4_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "global_head_dim": 32,
    },
    # whose configurations name no token that ends a text, or one beyond a small vocabulary whatever they are told
    "roc_bert": {"eos_token_id": 0},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "attention_window_size": 32},
    "codegen": {"rotary_dim": 8},
    "gptj": {"rotary_dim": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 32},
    "cohere_compass_text": {"layer_types": ["sliding_attention", "full_attention"]},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 4},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 16},
    # two layers of those that mix tokens, one of those that do not
    "nemotron_h": {
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "moe", "full_attention"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
    },
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 16},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_head": 16},
    "xlstm": {"qk_dim_factor": 1.0},
    "rwkv": {"attention_hidden_size": 64, "context_length": 128},
    "falcon_h1": {"mamba_d_ssm": 128},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "dots3_note_text": {"num_key_value_heads": 4},
    "zaya": {"num_experts_per_tok": 1},
    "hunyuan_v1_dense": {"head_dim": 16},
    "zamba": {"num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "hybrid"]},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 32},
    },
    # four residual streams, an indexer that chooses blocks of keys
    "qwen4_exp_text": {
        "hc_lowrank": 16,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    # one layer of two reads images, and is passed over where there are none
    "mllama": {"text_config": {"cross_attention_layers": [1]}},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 4, "moe_topk": 2},
}
"""Settings besides sizes, by family."""


def small(config_class: Any) -> Any:
    """Return the configuration of a model of two layers, or of four where layers share."""
    sample = config_class()
    settings = _sizes_of(sample) | EXTRA_SETTINGS.get(config_class.model_type, {})
    config = config_class(**settings)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if name in settings:
            setattr(config, name, settings[name])  # some configurations pass over a 0
    for part in (value for value in vars(config).values() if hasattr(value, "to_dict")):
        for name, value in _sizes_of(part).items():
            setattr(part, name, value)
    return config


def _sizes_of(config: Any) -> dict[str, Any]:
    """Return the settings that make a configuration small."""
    fields = config.to_dict()
    settings: dict[str, Any] = {
        name: size
        for name, size in SIZES.items()
        if isinstance(fields.get(name, fields.get(getattr(config, "attribute_map", {}).get(name))), int)
    }
    if "qk_rope_head_dim" in settings and "head_dim" in settings:
        settings["head_dim"] = settings["qk_rope_head_dim"]
    if "kv_lora_rank" in settings and "num_key_value_heads" in settings:
        settings["num_key_value_heads"] = settings["num_attention_heads"]
    for name in ("layer_types", "layers_block_type", "mlp_layer_types"):
        kinds = fields.get(name)
        if isinstance(kinds, list) and kinds:
            # Two layers of as many kinds as there are.
            settings[name] = (list(dict.fromkeys(kinds)) * 2)[:2]
    if "is_decoder" in fields and not fields.get("is_encoder_decoder"):
        settings["is_decoder"] = True  # otherwise encoders that can be decoders have no cache
    return settings | {name: 0 for name in ("pad_token_id", "bos_token_id", "eos_token_id") if name in fields}


def families() -> dict[str, Any]:
    """Return the configuration classes of all causal language models, by model type."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return {name: CONFIG_MAPPING[name] for name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) if name in CONFIG_MAPPING}


def attempt(family: str, folder: Path, recipes: Sequence[str] = RECIPES, uses: Sequence[str] = ()) -> dict[str, str]:
    """Try each stage of a family in this process; return for each ``ok`` or its error.

    Args:
        family: as transformers calls it.
        folder: an empty folder, for models.
        recipes: to try after the export.
        uses: to try with the compiled models, keys of :data:`USES`.
    """
    import torch
    import transformers

    from graphopt.errors import GraphoptError
    from graphopt.models.checkpoint import quiet

    row: dict[str, str] = {}
    try:
        with quiet():
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(small(families()[family]))
            randomize(model)  # where a router's weights begin as zeros, nothing says which of its experts are best
            model.save_pretrained(folder / "checkpoint")
    except Exception as error:  # whatever a configuration does not like about its sizes
        return {"configuration": _line(error)}
    stages: dict[str, Callable[[], object]] = {
        "export": functools.partial(_export, folder),
        **{recipe: functools.partial(_optimize, folder, recipe) for recipe in recipes},
        **{use: functools.partial(USES[use], folder, recipes) for use in uses},
    }
    for name, run in stages.items():
        try:
            with quiet():
                run()
            row[name] = "ok"
        except GraphoptError as error:
            row[name] = _line(error)
        except Exception as error:  # a fault of ours, which the table shows as such
            row[name] = f"FAULT {type(error).__name__}: {_line(error)}"
        if row[name] != "ok" and name == "export":
            break
    return row


def _export(folder: Path) -> None:
    """Export a model; logits of a prefill, of chunks and of single steps are those of transformers within the bound."""
    import graphopt
    from graphopt.errors import VerificationError
    from tests.models.test_recurrence import run_pieces

    (agreement,) = graphopt.export(folder / "checkpoint", folder / "float32").checks
    ids = np.random.default_rng(0).integers(0, SIZES["vocab_size"], (2, sum(CHUNKS)))
    mask = np.ones_like(ids)
    full_outputs, chunk_outputs = (
        run_pieces(folder / "float32", ids, mask, pieces) for pieces in ((sum(CHUNKS),), CHUNKS)
    )
    change = float(np.abs(chunk_outputs - full_outputs).max() / np.abs(full_outputs).max())
    figures = {"transformers": agreement.figures.get("largest_change", math.nan), "those of one call": change}
    for name, figure in figures.items():
        if not figure <= BOUND:
            raise VerificationError(f"logits differ from {name} by {figure:.1e} of the largest")


def _optimize(folder: Path, recipe: str) -> None:
    import graphopt

    graphopt.optimize(folder / "float32", recipe, folder / recipe, quality_tokens=0)
    graphopt.load(folder / recipe)


def _verify(folder: Path, recipes: Sequence[str]) -> None:
    """Verify the result of each recipe."""
    from graphopt.compile.replay import verify

    for recipe in recipes:
        if (folder / recipe).is_dir():
            verify(folder / "float32", folder / recipe)


def _draft(folder: Path, recipes: Sequence[str]) -> None:
    """Draft with three right guesses of four: each model completes a prompt as it does without drafts."""
    import graphopt
    from graphopt.errors import VerificationError
    from graphopt.inference.decoding.speculation import Speculation

    for name in ("float32", *recipes):
        if not (folder / name).is_dir():
            continue
        session = graphopt.load(folder / name)
        (plain,) = graphopt.generate(session, [_prompts()[0]], max_new_tokens=TOKENS)
        wrong_token = next(token for token in range(SIZES["vocab_size"]) if token not in plain.tokens)
        speculation = Speculation(OracleProposer(plain.tokens, 0.75, wrong_token), 3)
        (completion,) = graphopt.generate(session, [_prompts()[0]], max_new_tokens=TOKENS, proposer=speculation)
        # Where onnxruntime's own products sum 1 row and 4 rows in other orders, a note says so.
        if completion.tokens != plain.tokens and not speculation.stats.report()["notes"]:
            raise VerificationError(f"drafts of {name} turn {plain.tokens} into {completion.tokens}")


def _serve(folder: Path, _: Sequence[str]) -> None:
    """Serve three requests at once: each gets the tokens that it has alone without a server."""
    import graphopt
    from graphopt.errors import InputError, VerificationError
    from graphopt.passes.recipe import Recipe
    from graphopt.serving.batch import Batch
    from graphopt.serving.checks import check_folder
    from graphopt.serving.stream import Turn
    from tests.serving.test_batch import run

    steps = [{"step": "canonicalize"}, {"step": "serve", "memory": "16MB"}]
    recipe = Recipe.model_validate({"name": "serve", "steps": steps})
    reports = graphopt.optimize(folder / "float32", recipe, folder / "serve", quality_tokens=0).manifest.passes
    (report,) = (report for report in reports if report.name == "serve")
    try:
        check_folder(folder / "serve")
    except InputError:
        reasons = dict.fromkeys(f"{skip.where}: {skip.reason}" for skip in report.skips)
        if not reasons:
            raise
        raise VerificationError("; ".join(reasons)) from None
    session = graphopt.load(folder / "float32")
    single_texts = [graphopt.generate(session, [prompt], max_new_tokens=TOKENS)[0].tokens for prompt in _prompts()]
    batch = Batch(folder / "serve", threads=1, on_failure=print)
    try:
        batch_texts = [tokens for tokens, _ in run(batch, [Turn(tuple(prompt), TOKENS) for prompt in _prompts()])]
    finally:
        batch.close()
    if batch_texts != single_texts:
        raise VerificationError(f"an engine makes {batch_texts}, where the model makes {single_texts}")


USES: dict[str, Callable[[Path, Sequence[str]], None]] = {"verify": _verify, "drafts": _draft, "serve": _serve}
"""What a user does with a model next, by name."""


def _prompts() -> list[list[int]]:
    """Return prompts of several lengths, without the tokens that begin or end a text."""
    random = np.random.default_rng(1)
    return [random.integers(1, SIZES["vocab_size"], length).tolist() for length in (9, 21, 4)]


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def attempt_apart(family: str, seconds: float, recipes: str, uses: str = "") -> dict[str, str]:
    """Return the row of a family, tried in a process of its own for at most ``seconds``."""
    with tempfile.TemporaryDirectory(prefix="family-") as temporary:
        result = Path(temporary) / "row.json"
        lists = [[*filter(None, names.split(","))] for names in (recipes, uses)]
        process = SERVER.Process(target=_attempt_into, args=(family, result, *lists))
        process.start()
        process.join(seconds)
        if process.is_alive():
            process.kill()
            process.join()
            return {"process": f"took more than {seconds:g} s"}
        if not result.is_file():
            return {"process": f"FAULT ended with {process.exitcode}"}
        row: dict[str, str] = json.loads(result.read_text("utf-8"))
        return row


def _attempt_into(family: str, result: Path, recipes: Sequence[str], uses: Sequence[str]) -> None:
    folder = result.parent / "models"
    folder.mkdir()
    result.write_text(json.dumps(attempt(family, folder, recipes, uses)), "utf-8")


def summary(rows: dict[str, dict[str, str]]) -> list[list[str]]:
    """Return a line for each family: the stages that passed, and the first error."""
    lines = []
    for family, row in sorted(rows.items()):
        failures = [(name, text) for name, text in row.items() if text != "ok"]
        stages_passed = ", ".join(name for name, text in row.items() if text == "ok") or "nothing"
        lines.append([family, stages_passed, f"{failures[0][0]}: {failures[0][1]}" if failures else ""])
    return lines


def main(
    results: Annotated[Path, typer.Option(help="a file of rows, one a line")],
    only: Annotated[str, typer.Option(help="families, separated by commas; all by default")] = "",
    seconds: Annotated[float, typer.Option(help="what a family may take")] = 240,
    recipes: Annotated[str, typer.Option(help="recipes to try after the export; empty for none")] = ",".join(RECIPES),
    uses: Annotated[str, typer.Option(help="what to try with the models: verify, drafts, serve")] = "",
    markdown: Annotated[Path | None, typer.Option(help="write the table here too")] = None,
) -> None:
    """Try families that have no row yet, and print all rows."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    SERVER.set_forkserver_preload(["transformers.exporters.exporter_onnx", "graphopt.models.unrolling", "onnxruntime"])
    old_lines = results.read_text("utf-8").splitlines() if results.is_file() else []
    rows: dict[str, dict[str, str]] = {row["family"]: row["stages"] for row in map(json.loads, old_lines)}
    names = only.split(",") if only else list(families())
    for family in track([family for family in names if family not in rows], "families"):
        start = time.monotonic()
        rows[family] = attempt_apart(family, seconds, recipes, uses)
        row = {"family": family, "seconds": round(time.monotonic() - start), "stages": rows[family]}
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    headings, cells = ["family", "what it went through", "where it stopped"], summary(rows)
    table = Table(*headings)
    for line in cells:
        table.add_row(*line)
    Console().print(table)
    stages = Counter(name for row in rows.values() for name, text in row.items() if text == "ok")
    print(f"{len(rows)} families: " + ", ".join(f"{name} {count}" for name, count in stages.items()))
    if markdown is not None:
        text = "".join(
            f"| {' | '.join(cell.replace('|', '/') for cell in line)} |\n" for line in [headings, ["---"] * 3, *cells]
        )
        markdown.write_text(text, "utf-8")


if __name__ == "__main__":
    typer.run(main)
