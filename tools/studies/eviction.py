"""Compare scores by which tokens of a cache are evicted: KL of the tokens behind a prompt, beside the whole cache.

    python tools/studies/eviction.py                                    # SmolLM2, 7936 tokens; `make real` fetches it
    python tools/studies/eviction.py --share 0.5 --only streaming --only keydiff

*Emulated* in PyTorch with float weights: the prompt is read densely, then each KV head keeps the same number of tokens,
the first 64 and the newest 256 among them, and the next 256 tokens of the text read what is left and one another. So
all methods take the same bytes. Queries of the prompt are at hand for those scores that need some.
"""

from __future__ import annotations

import fnmatch
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# Run as a script, Python looks for modules in tools/ only.
sys.path.insert(0, str(Path(__file__).parents[2]))
from graphopt.models.gguf.checkpoint import load_gguf
from tools.bench.parts.options import JsonFile
from tools.studies.cache_quality import python_documentation
from tools.studies.caches.rounding import Tensor
from tools.studies.real.models import fetch

NEXT, SINKS, RECENT = 256, 64, 256
ASKED = 8
"""Every so many queries of the prompt add up their attention."""


class Prompt:
    """A model, what it stored of a prompt, and what queries attended to.

    Args:
        model: of transformers.
        ids: int64 [prompt and next tokens].
    """

    def __init__(self, model: Any, ids: Tensor) -> None:
        torch.set_grad_enabled(False)
        self.model, self.ids, self.length = model.eval(), ids, len(ids) - NEXT
        self.cache: dict[int, tuple[Tensor, Tensor]] = {}
        self.received: dict[int, Tensor] = {}  # attention of the prompt's queries, summed, [heads, tokens]
        self.newest: dict[int, Tensor] = {}  # attention of its last 64 queries, [heads, tokens]
        self.queries: dict[int, tuple[Tensor, Tensor]] = {}  # mean [Hq, D] and covariance, without positions
        self.kept: dict[int, Tensor] | None = None
        ALL_ATTENTION_FUNCTIONS.register("graphopt_eviction", self._attention)
        model.config._attn_implementation = "graphopt_eviction"
        self.model.model(ids[None, : self.length], use_cache=False)

    def log_probabilities(self, kept: dict[int, Tensor]) -> Tensor:
        """Return those behind the next tokens where heads kept tokens, int64 [Hk, n] by layer."""
        self.kept = kept
        positions = torch.arange(self.length, len(self.ids))[None]
        found = self.model.model(self.ids[None, self.length :], position_ids=positions, use_cache=False)
        logits: Tensor = self.model.lm_head(found.last_hidden_state[0])
        return torch.log_softmax(logits.float(), -1)

    def rotate(self, x: Tensor, positions: Tensor, direction: int) -> Tensor:
        """Embed positions in x [heads, tokens, D], or take them off again."""
        cos, sin = self.model.model.rotary_emb(x, positions[None])
        first, second = x.chunk(2, -1)
        turned: Tensor = x * cos + torch.cat([-second, first], -1) * sin * direction
        return turned

    def _attention(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **others: Any
    ) -> tuple[Tensor, None]:
        del mask, others
        q, k, v, layer = query[0], key[0], value[0], module.layer_idx
        group = len(q) // len(k)
        if self.kept is None:
            self.cache[layer] = (k, v)
            plain = self.rotate(q, torch.arange(self.length), -1)
            centred = plain - plain.mean(1, keepdim=True)
            self.queries[layer] = (plain.mean(1), centred.mT @ centred / self.length)
            asked = torch.arange(ASKED - 1, self.length, ASKED)
            self.received[layer] = _received(q, k, asked, scaling)
            self.newest[layer] = _received(q, k, torch.arange(self.length - 64, self.length), scaling)
            out = torch.nn.functional.scaled_dot_product_attention(
                q[None], k[None], v[None], is_causal=True, scale=scaling, enable_gqa=True
            )
            return out.transpose(1, 2), None
        stored, index = self.cache[layer], self.kept[layer][..., None].expand(-1, -1, k.shape[-1])
        keys, values = (torch.cat([each.gather(1, index), new], 1) for each, new in zip(stored, (k, v), strict=True))
        scores = (q * scaling).view(len(k), group, NEXT, -1) @ keys[:, None].mT
        later = torch.ones(NEXT, NEXT, dtype=torch.bool).triu(1)
        scores[..., -NEXT:].masked_fill_(later, -torch.inf)
        found = torch.softmax(scores, -1) @ values[:, None]
        return found.view(len(q), NEXT, -1).transpose(0, 1)[None], None


def _received(q: Tensor, k: Tensor, asked: Tensor, scaling: float) -> Tensor:
    """Return the attention that the queries at ``asked`` give each token, summed, [Hk, tokens]."""
    received = torch.zeros(k.shape[:2])
    for part in asked.split(128):
        scores = (q[:, part] * scaling).view(len(k), -1, len(part), k.shape[-1]) @ k[:, None].mT
        scores.masked_fill_(torch.arange(k.shape[1])[None] > part[:, None], -torch.inf)
        received += torch.softmax(scores, -1).sum((1, 2))
    return received


def streaming(prompt: Prompt, layer: int) -> Tensor:
    """The newest tokens (StreamingLLM, Xiao et al. 2024)."""
    heads = len(prompt.cache[layer][0])
    return torch.arange(prompt.length, dtype=torch.float32).expand(heads, -1)


def key_norm(prompt: Prompt, layer: int) -> Tensor:
    """Short keys (Devoto et al. 2024)."""
    scores: Tensor = -prompt.cache[layer][0].norm(dim=-1)
    return scores


def keydiff(prompt: Prompt, layer: int) -> Tensor:
    """Keys unlike the mean direction of all keys (KeyDiff, Park et al. 2025)."""
    keys = torch.nn.functional.normalize(prompt.cache[layer][0], dim=-1)
    return -(keys * torch.nn.functional.normalize(keys.mean(1, keepdim=True), dim=-1)).sum(-1)


def snapkv(prompt: Prompt, layer: int) -> Tensor:
    """Attention of the last 64 queries, the largest of 7 neighbours (SnapKV, Li et al. 2024)."""
    return torch.nn.functional.max_pool1d(prompt.newest[layer][None], 7, 1, 3)[0]


def accumulated(prompt: Prompt, layer: int) -> Tensor:
    """Attention of all queries, here of every 8th, added up (H2O, Zhang et al. 2023)."""
    return prompt.received[layer]


def mean_received(prompt: Prompt, layer: int) -> Tensor:
    """The same, per query that could have seen the token."""
    return prompt.received[layer] / (prompt.length - torch.arange(prompt.length)).clamp(min=64)


def expected_attention(prompt: Prompt, layer: int) -> Tensor:
    """E[exp(q k)] |v| for normal queries at the next 512 positions (Devoto et al. 2025), the mean over the heads."""
    keys, values = prompt.cache[layer]
    mean, covariance = prompt.queries[layer]
    size, group = keys.shape[-1], len(mean) // len(keys)
    positions = torch.arange(prompt.length, prompt.length + 512)
    unit = torch.eye(size).expand(512, -1, -1).transpose(0, 1)  # [D, 512, D]
    turn = prompt.rotate(unit, positions, 1).mean(1)  # of rows, averaged
    mean, covariance = mean @ turn, turn.mT @ covariance @ turn
    found = []
    for head, k in enumerate(keys):
        rows = slice(head * group, (head + 1) * group)
        linear = k @ mean[rows].mT / size**0.5
        square = torch.einsum("tc,hcd,td->th", k, covariance[rows], k) / (2 * size)
        found.append(torch.softmax(linear + square, 0).mean(-1))
    scores: Tensor = torch.stack(found) * values.norm(dim=-1)
    return scores


METHODS: dict[str, Callable[[Prompt, int], Tensor]] = {
    "streaming": streaming,
    "key norm": key_norm,
    "keydiff": keydiff,
    "snapkv": snapkv,
    "accumulated attention": accumulated,
    "mean attention": mean_received,
    "expected attention": expected_attention,
}


def kept_tokens(scores: Tensor, count: int) -> Tensor:
    """Return the ``count`` tokens that heads keep, in order, int64 [Hk, count]: the first, the newest and the best."""
    always = torch.zeros_like(scores, dtype=torch.bool)
    always[:, :SINKS] = always[:, -RECENT:] = True
    return scores.masked_fill(always, torch.inf).topk(count, dim=-1).indices.sort(-1).values


def main(
    model: Annotated[str, typer.Option(help="smollm2, a .gguf file, or a Hugging Face folder")] = "smollm2",
    tokens: Annotated[int, typer.Option(min=1024, help="of the prompt")] = 7936,
    share: Annotated[float, typer.Option(min=0.01, max=1, help="of the tokens, that stay")] = 1 / 3,
    only: Annotated[list[str] | None, typer.Option(help="names of methods, with * for anything")] = None,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    json_file: JsonFile = None,
) -> None:
    """Read the prompt, evict by each score, print what that costs."""
    torch.set_num_threads(threads)
    checkpoint = fetch(model) if model == "smollm2" else Path(model)
    if checkpoint.suffix == ".gguf":
        loaded = load_gguf(checkpoint)[0]
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(checkpoint.parent), gguf_file=checkpoint.name)
    else:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(str(checkpoint), dtype=torch.float32)
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(checkpoint))
    ids = torch.tensor(tokenizer(python_documentation())["input_ids"][: tokens + NEXT])
    began = time.perf_counter()
    prompt = Prompt(loaded, ids)
    print(f"prompt read in {time.perf_counter() - began:.0f} s", flush=True)
    everything = {layer: torch.arange(tokens).expand(len(keys), -1) for layer, (keys, _) in prompt.cache.items()}
    reference = prompt.log_probabilities(everything)
    table, rows = Table("kept by", "KL, mean", "KL, 99%", "perplexity"), []
    for name, score in METHODS.items():
        if only and not any(fnmatch.fnmatch(name, pattern) for pattern in only):
            continue
        kept = {layer: kept_tokens(score(prompt, layer), round(tokens * share)) for layer in prompt.cache}
        found = prompt.log_probabilities(kept)
        kl = (reference.exp() * (reference - found)).sum(-1)
        nats = -found[:-1].gather(-1, ids[-NEXT + 1 :, None])
        row = {"kept_by": name, "kl": float(kl.mean()), "kl_99": float(kl.quantile(0.99))}
        row["perplexity"] = float(nats.mean().exp())
        rows.append(row)
        print(row, flush=True)
        table.add_row(name, *(f"{row[figure]:.4f}" for figure in ("kl", "kl_99", "perplexity")))
    Console().print(table)
    if json_file is not None:
        json_file.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
