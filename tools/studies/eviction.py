"""Compare scores by which tokens of a cache are evicted: KL of the tokens after a prompt from the whole cache.

    python tools/studies/eviction.py                                    # SmolLM2, 7936 tokens; `make real` fetches it
    python tools/studies/eviction.py --share 0.5 --only streaming --only keydiff
    python tools/studies/eviction.py --only 'all, *'                    # caches that keep less of each token
    python tools/studies/eviction.py --only 'read, *'                   # pages that each query chooses of the whole
    python tools/studies/eviction.py --kernels                          # graphopt's own evictions, at equal bytes

*Emulated* in PyTorch with float weights: the prompt is read densely, then each KV head keeps the same number of tokens,
the first 64 and the newest 256 among them, and the next 256 tokens of the text read these and one another. So all
methods take the same bytes, and so do those whose heads share the tokens of a layer. Queries of the prompt are there
for scores that need them. ``next queries`` are those of the next tokens, not known in practice: a bound, no method.

Methods that begin with "all" keep all tokens, and less of each; bytes are a share of float16 keys and values.
Those that begin with "read" keep the whole cache, of which each query reads pages of 16 with ``--read`` tokens.

``--kernels`` emulates nothing: an artifact for each storage of caches reads the prompt, page by page, its decoder
evicts as many tokens as leave ``--share`` of the bytes that float16 pages take, and reads the next tokens. Bytes are
those of all states, slots of floats and scales among them, so fewer bits leave room for more tokens.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table

# Run as a script, Python looks for modules in tools/ only.
sys.path.insert(0, str(Path(__file__).parents[2]))
from graphopt.models.gguf.checkpoint import load_gguf
from tools.bench.parts.options import JsonFile, is_selected
from tools.studies.cache_quality import python_documentation
from tools.studies.caches.coarse_caches import (
    coarse_rest,
    fewer_key_channels,
    low_rank_keys,
    of_classes,
    oscar,
    per_token,
    qjl,
    round_cache,
    shared_layers,
    smooth_attention,
    spectral,
    turboquant,
    without_tail,
)
from tools.studies.caches.compensation import fuse_neighbours, learn_convolutions, with_page_means, with_random_features
from tools.studies.caches.evicted_pages import Outcome, by_kernels
from tools.studies.caches.eviction_scores import (
    METHODS,
    kept_of_all,
    kept_tokens,
    learn_probes,
    mean_received,
    merge_tokens,
    sum_received,
)
from tools.studies.caches.page_scores import (
    by_best_key,
    by_bounds,
    by_centroids,
    by_indexer,
    by_mean,
    by_representatives,
    choose_pages,
)
from tools.studies.caches.prompt import NEXT, Prompt, Way
from tools.studies.caches.rounding import Tensor
from tools.studies.real.models import fetch

Score = Callable[[Prompt, int], Tensor]

LATE = "snapkv of 512 queries, by values"


def _with_rest(prompt: Prompt, score: Score, kept_share: float, kept_bits: int | None) -> Way:
    count = round(prompt.length * kept_share)
    tokens = {layer: kept_tokens(score(prompt, layer), count) for layer in prompt.cache}
    return coarse_rest(prompt, tokens, kept_bits, 2)


def _layers_share(prompt: Prompt, score: Score, count: int) -> Way:
    kept_masks = kept_of_all({layer: score(prompt, layer) for layer in prompt.cache}, count)
    return Way(kept_masks, bytes=count / prompt.length)


def ways(prompt: Prompt, share: float, budget: int) -> dict[str, Callable[[], Way]]:
    """Return all methods by their names."""
    return _that_evict(prompt, share) | _that_round(prompt) | _that_read_less(budget)


def _that_evict(prompt: Prompt, share: float) -> dict[str, Callable[[], Way]]:
    count = round(prompt.length * share)

    def evict(score: Score, *, is_shared: bool) -> Way:
        kept_masks = {layer: kept_tokens(score(prompt, layer), count, is_shared=is_shared) for layer in prompt.cache}
        return Way(kept_masks, bytes=share)

    methods: dict[str, Callable[[], Way]] = {}
    methods |= {name: partial(evict, score, is_shared=False) for name, score in METHODS.items()}
    for name in ("snapkv", LATE, "mean attention", "kvzap", "next queries"):
        methods[f"{name}, heads share"] = partial(evict, METHODS[name], is_shared=True)
    for name in ("snapkv", LATE, "next queries"):
        methods[f"{name}, heads and layers share"] = partial(_layers_share, prompt, METHODS[name], count)
    for name in ("streaming", "keydiff", "snapkv"):
        for kept_share, kept_bits, title in ((0.43, 8, "43% in 8 bits"), (0.17, None, "17% as floats")):
            methods[f"{name}, {title}, others in 2"] = partial(_with_rest, prompt, METHODS[name], kept_share, kept_bits)
    methods["merged (EMS)"] = partial(merge_tokens, prompt, count)
    methods["streaming, the rest by 256 random features (NTK-Attention)"] = partial(
        with_random_features, prompt, count, 256
    )
    for is_counted in (False, True):
        title = "fused by convolutions (LoCoCo)" + (", counted" if is_counted else "")
        methods[title] = partial(fuse_neighbours, prompt, count, is_counted=is_counted)
    for is_fitted in (False, True):
        for name in ("streaming", "snapkv"):
            title = f"{name}, the rest by page means (NTK-Attention)" + (", fitted" if is_fitted else "")
            methods[title] = partial(with_page_means, prompt, METHODS[name], count, is_fitted=is_fitted)
    return methods


def _that_round(prompt: Prompt) -> dict[str, Callable[[], Way]]:
    methods: dict[str, Callable[[], Way]] = {}
    for name, saliency in (("MiKV", sum_received), ("ZipCache", mean_received)):
        methods[f"all, {name}: a quarter in 4 bits, others in 2"] = partial(of_classes, prompt, saliency, 0.25)
    for part in (0.8, 0.6):
        methods[f"all, ThinK: {part:.0%} of key channels"] = partial(fewer_key_channels, prompt, part)
    for rank in (96, 48):
        methods[f"all, ShadowKV: keys of rank {rank} of 192"] = partial(low_rank_keys, prompt, rank)
    methods["all, CSKV: keys and values of rank 96 of 192"] = partial(low_rank_keys, prompt, 96, 96)
    methods["all, MiniCache: deeper layers in pairs, 5% of tokens apart"] = partial(shared_layers, prompt, 0.05)
    for bits in (4, 2):
        for name, function in (
            (f"TurboQuant, {bits} bits", turboquant),
            (f"SmoothAttention, {bits} bits per token", smooth_attention),
            (f"{bits} bits per token", partial(per_token, prefix=0)),
            (f"spectral, {bits} bits", spectral),
            (f"OSCAR, {bits} bits", partial(oscar, prompt)),
        ):
            scale_bits = 0.375 if function is turboquant else 0.5
            methods[f"all, {name}"] = partial(round_cache, prompt, partial(function, bits=bits), bits + scale_bits)
    methods["all, QJL: keys of 256 signs, values 4 bits"] = partial(
        round_cache, prompt, partial(qjl, rows=256, bits=4), 4.375
    )
    for prefix in (0, 4):
        methods[f"all, QFeP: {prefix} first tokens in floats, 4 bits, no other floats"] = partial(
            without_tail, prompt, prefix
        )
    return methods


def _that_read_less(budget: int) -> dict[str, Callable[[], Way]]:
    methods: dict[str, Callable[[], Way]] = {}
    for name, score in (
        ("mean", by_mean),
        ("bounds (Quest)", by_bounds),
        ("4 representatives (InfLLM)", by_representatives),
        ("best key", by_best_key),
    ):
        methods[f"read, {name}"] = partial(choose_pages, score, budget)
    for channels in (8, 16):
        methods[f"read, indexer of {channels} channels"] = partial(by_indexer, channels, budget)
    methods["read, centroids (Squeezed Attention)"] = partial(by_centroids, budget)
    return methods


def _emulate(
    checkpoint: Path, all_ids: Tensor, tokens: int, share: float, read_tokens: int, only: Sequence[str]
) -> Iterator[Outcome]:
    """Yield the outcome of each method on the prompt, the first ``tokens`` of the text."""
    if checkpoint.suffix == ".gguf":
        model = load_gguf(checkpoint)[0]
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(str(checkpoint), dtype=torch.float32)
    end, begin = tokens + NEXT, time.perf_counter()
    prompt = Prompt(model, all_ids[:end])
    print(f"prompt read in {time.perf_counter() - begin:.0f} s", flush=True)
    reference = prompt.log_probabilities(Way())
    for name, make in ways(prompt, share, read_tokens).items():
        if not is_selected(name, only):
            continue
        if "kvzap" in name and prompt.probes is None:
            prompt.probes = learn_probes(model, all_ids[end : end + 4096 + NEXT])
            prompt.take_model()
        if "LoCoCo" in name and not prompt.filters:
            prompt.filters = learn_convolutions(model, all_ids[end : end + 4096 + NEXT])
            prompt.take_model()
        way = make()
        yield Outcome(name, way.bytes, reference, prompt.log_probabilities(way))


def main(
    model: Annotated[str, typer.Option(help="smollm2, a .gguf file, or a Hugging Face folder")] = "smollm2",
    tokens: Annotated[int, typer.Option(min=1024, help="of the prompt")] = 7936,
    share: Annotated[float, typer.Option(min=0.01, max=1, help="of the tokens, that stay")] = 1 / 3,
    read_tokens: Annotated[int, typer.Option("--read", min=16, help="tokens of the pages that a query chooses")] = 1024,
    only: Annotated[list[str] | None, typer.Option(help="names of methods, with * for anything")] = None,
    kernels: Annotated[bool, typer.Option(help="run artifacts instead of emulating")] = False,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    json_file: JsonFile = None,
) -> None:
    """Read the prompt, evict by each score, print the loss."""
    torch.set_num_threads(threads)
    checkpoint = fetch(model) if model == "smollm2" else Path(model)
    source = {"gguf_file": checkpoint.name} if checkpoint.suffix == ".gguf" else {}
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(checkpoint.parent if source else checkpoint), **source)
    all_ids = torch.tensor(tokenizer(python_documentation())["input_ids"])
    ids = all_ids[: tokens + NEXT]
    if kernels:
        outcomes = by_kernels(checkpoint, ids, share, only or ())
    else:
        outcomes = _emulate(checkpoint, all_ids, tokens, share, read_tokens, only or ())
    table, rows = Table("kept by", "bytes", "KL, mean", "KL, 99%", "perplexity"), []
    for outcome in outcomes:
        kl = (outcome.reference.exp() * (outcome.reference - outcome.logs)).sum(-1)
        nats = -outcome.logs[:-1].gather(-1, ids[-NEXT + 1 :, None])
        figures = {"kl": float(kl.mean()), "kl_99": float(kl.quantile(0.99)), "perplexity": float(nats.mean().exp())}
        rows.append({"kept_by": outcome.name, "bytes": outcome.bytes, **figures})
        print(rows[-1], flush=True)
        table.add_row(outcome.name, f"{outcome.bytes:.4f}", *(f"{figure:.4f}" for figure in figures.values()))
    Console().print(table)
    if json_file is not None:
        json_file.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
