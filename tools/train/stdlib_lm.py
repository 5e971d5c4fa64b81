r"""Train the model that ships with graphopt, a small Llama on the source of the Python standard library, or a sibling.

Writes a Hugging Face folder (``config.json``, fp16 ``model.safetensors``, ``tokenizer.json``, ``README.md`` with the
run). The learning-rate schedule follows processor time, not the step count: a run takes ``--minutes`` on any machine,
and may be paused.

    python tools/train/stdlib_lm.py --minutes 75 -o graphopt/models/stdlib_lm
    python tools/train/stdlib_lm.py --minutes 15 -o stdlib_hybrid --dtype float32 --batch-tokens 4096 --hybrid
    python tools/train/stdlib_lm.py --minutes 17 -o stdlib_lm_draft --dtype float32 \
        --batch-tokens 4096 --sibling-of graphopt/models/stdlib_lm
    TORCH_COMPILE_DISABLE=1 python tools/train/stdlib_lm.py --minutes 4 -o stdlib_mixture --dtype float32 \
        --batch-tokens 2048 --experts-of graphopt/models/stdlib_lm

The sibling is a drafter for the shipped model: it has the same tokenizer and a fifth of the parameters, and learns the
shipped model's probabilities of the next token, which hold more than the token itself (Hinton et al., arXiv
1503.02531).

The mixture is the shipped model with the neurons of each MLP dealt to four experts, of which a router chooses two for a
token, and trained further (LLaMA-MoE, Zhu et al., arXiv 2406.16554): a few minutes recover what the model has learned.
"""

from __future__ import annotations

import json
import lzma
import math
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from graphopt.util.stdlib_text import HELD_OUT, held_out_text, training_texts

END_OF_TEXT = "<|endoftext|>"
VOCABULARY = 4096
CONTEXT = 1024
EXPERTS, EXPERTS_PER_TOKEN = 4, 2
# The share of the loss that keeps experts in use (Fedus et al. 2021, equation 4), as Mixtral has it.
BALANCE = 0.001

Kind = Literal["llama", "hybrid", "mixture"]


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Return a byte-level BPE tokenizer that puts ``END_OF_TEXT`` in front of every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    end = tokenizer.token_to_id(END_OF_TEXT)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, end)]
    )
    return tokenizer


@dataclass(frozen=True)
class Shape:
    """The size of a Llama, a hybrid with gated DeltaNet or a mixture, with heads of 64 and a tied embedding.

    ``inner`` is the width of the MLP, in a mixture of all experts together.
    """

    hidden: int
    inner: int
    layers: int
    heads: int
    key_value_heads: int
    kind: Kind = "llama"

    def model(self) -> PreTrainedModel:
        """Return an untrained model of this shape."""
        if self.kind == "hybrid":
            return self._hybrid()
        if self.kind == "mixture":
            return self._mixture()
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCABULARY,
                hidden_size=self.hidden,
                intermediate_size=self.inner,
                num_hidden_layers=self.layers,
                num_attention_heads=self.heads,
                num_key_value_heads=self.key_value_heads,
                head_dim=64,
                max_position_embeddings=CONTEXT,
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
                tie_word_embeddings=True,
                bos_token_id=0,
                eos_token_id=0,
                # On a CPU the compiler fuses plain attention better than it can call the flash kernel.
                attn_implementation="eager",  # type: ignore[call-arg]
            )
        )

    def _hybrid(self) -> PreTrainedModel:
        """Return a Qwen3-Next without experts: gated DeltaNet in three layers of four, attention in the fourth."""
        return Qwen3NextForCausalLM(
            Qwen3NextConfig(
                vocab_size=VOCABULARY,
                hidden_size=self.hidden,
                intermediate_size=self.inner,
                num_hidden_layers=self.layers,
                num_attention_heads=self.heads,
                num_key_value_heads=self.key_value_heads,
                head_dim=64,
                linear_num_key_heads=self.heads // 2,
                linear_num_value_heads=self.heads,
                linear_key_head_dim=64,
                linear_value_head_dim=64,
                layer_types=[
                    "linear_attention" if (layer + 1) % 4 else "full_attention" for layer in range(self.layers)
                ],
                mlp_only_layers=list(range(self.layers + 1)),
                max_position_embeddings=CONTEXT,
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
                tie_word_embeddings=True,
                bos_token_id=0,
                eos_token_id=0,
                attn_implementation="eager",  # type: ignore[call-arg]
            )
        )

    def _mixture(self) -> PreTrainedModel:
        """Return a Llama in which every MLP is a mixture of experts."""
        return MixtralForCausalLM(
            MixtralConfig(
                vocab_size=VOCABULARY,
                hidden_size=self.hidden,
                intermediate_size=self.inner // EXPERTS,
                num_hidden_layers=self.layers,
                num_attention_heads=self.heads,
                num_key_value_heads=self.key_value_heads,
                head_dim=64,
                num_local_experts=EXPERTS,
                num_experts_per_tok=EXPERTS_PER_TOKEN,
                router_aux_loss_coef=BALANCE,
                rms_norm_eps=1e-6,
                max_position_embeddings=CONTEXT,
                sliding_window=None,
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
                tie_word_embeddings=True,
                bos_token_id=0,
                eos_token_id=0,
                attn_implementation="eager",  # type: ignore[call-arg]
                experts_implementation="grouped_mm",
            )
        )


def deal_neurons(llama: PreTrainedModel, mixture: PreTrainedModel) -> None:
    """Give a mixture the weights of a Llama, the neurons of an MLP dealt to its experts in order.

    A token has k of E experts, with weights that sum to 1, where the Llama adds all: so their outputs are times E.
    """
    weights, mixture_weights = llama.state_dict(), mixture.state_dict()
    for name, value in mixture_weights.items():
        layer, _, part = name.partition(".mlp.")
        if name in weights:
            value.copy_(weights[name])
        elif part == "experts.gate_up_proj":
            gates, ups = (weights[f"{layer}.mlp.{kind}_proj.weight"].chunk(EXPERTS) for kind in ("gate", "up"))
            value.copy_(torch.stack([torch.cat(pair) for pair in zip(gates, ups, strict=True)]))
        elif part == "experts.down_proj":
            value.copy_(EXPERTS * torch.stack(weights[f"{layer}.mlp.down_proj.weight"].chunk(EXPERTS, 1)))


# The widths of their MLPs are 20 * 2^5 and 5 * 2^6: there are Hadamard matrices of both.
SHIPPED_SHAPE = Shape(hidden=256, inner=640, layers=6, heads=4, key_value_heads=2)
HYBRID = Shape(hidden=256, inner=640, layers=4, heads=4, key_value_heads=2, kind="hybrid")
MIXTURE = Shape(hidden=256, inner=640, layers=6, heads=4, key_value_heads=2, kind="mixture")
SIBLING = Shape(hidden=128, inner=320, layers=3, heads=2, key_value_heads=1)


def learning_rate_share(progress: float) -> float:
    """Return the share of the peak learning rate at ``progress`` in [0, 1]: 2% warm-up, constant, linear decay."""
    return min(progress / 0.02, 1.0, (1.0 - progress) / 0.5)


def context_length(progress: float) -> int:
    """Return the window to train on at ``progress``: short ones are cheaper, the last fifth learns far positions."""
    return CONTEXT // 2 if progress < 0.8 else CONTEXT


def bits_per_byte(model: PreTrainedModel, ids: torch.Tensor, size: int) -> float:
    """Return the bits that ``model`` needs per byte of a text of ``size`` bytes, in windows that overlap by half."""
    stride, nats = CONTEXT // 2, 0.0
    model.eval()
    with torch.no_grad():
        for start in range(0, len(ids) - 1, stride):
            window = ids[start : start + CONTEXT + 1]
            losses = torch.nn.functional.cross_entropy(
                model(window[None, :-1]).logits[0].float(), window[1:], reduction="none"
            )
            nats += losses[0 if start == 0 else stride :].sum().item()
            if start + CONTEXT + 1 >= len(ids):
                break
    model.train()
    return nats / math.log(2) / size


def loss_of(
    model: PreTrainedModel, windows: torch.Tensor, teacher: PreTrainedModel | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return the mean cross entropy in nats of ``windows``, int64 ``[batch, length + 1]``.

    With a teacher it is the cross entropy with the teacher's probabilities instead of the next tokens. The loss of a
    mixture contains a share of a penalty on uneven use of its experts.
    """
    is_mixture = isinstance(model, MixtralForCausalLM)
    with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        outputs = model(windows[:, :-1], **({"output_router_logits": True} if is_mixture else {}))
        logits = outputs.logits.flatten(0, 1).float()
        if teacher is None:
            loss = torch.nn.functional.cross_entropy(logits, windows[:, 1:].flatten())
            return loss + BALANCE * outputs.aux_loss if is_mixture else loss
        with torch.no_grad():
            chances = teacher(windows[:, :-1]).logits.flatten(0, 1).float().softmax(-1)
    return torch.nn.functional.cross_entropy(logits, chances)


def optimizers_of(model: PreTrainedModel) -> list[torch.optim.Optimizer]:
    """Return the optimizer of the matrices, and that of all other parameters."""
    if isinstance(model, MixtralForCausalLM):  # it has learned already
        return [torch.optim.AdamW(model.parameters(), lr=0.001, betas=(0.9, 0.95), weight_decay=0.0)]
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    vectors = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]  # and taps of convolutions
    return [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.01, momentum=0.95),
        torch.optim.AdamW(vectors, lr=0.006, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def main(
    minutes: Annotated[float, typer.Option(help="how long to train")],
    output: Annotated[Path, typer.Option("-o", "--output", help="folder to write")],
    batch_tokens: Annotated[int, typer.Option(help="tokens per step")] = 12 * CONTEXT,
    seed: int = 0,
    checkpoint_minutes: Annotated[float, typer.Option(help="how often to save and judge")] = 10.0,
    sibling_of: Annotated[Path | None, typer.Option(help="train the sibling of the model in this folder")] = None,
    dtype: Annotated[Literal["bfloat16", "float32"], typer.Option(help="of products; see what is faster")] = "bfloat16",
    hybrid: Annotated[bool, typer.Option(help="gated DeltaNet in three layers of four")] = False,
    experts_of: Annotated[
        Path | None, typer.Option(help="deal the neurons of the model in this folder to experts")
    ] = None,
) -> None:
    """Train, judge on the held-out modules against ``xz -9e``, and save."""
    torch.manual_seed(seed)
    texts = list(training_texts().values())
    origin = sibling_of or experts_of
    if origin is None:
        shape, tokenizer = HYBRID if hybrid else SHIPPED_SHAPE, train_tokenizer(texts)
    else:
        shape, tokenizer = SIBLING if sibling_of else MIXTURE, Tokenizer.from_file(str(origin / "tokenizer.json"))
    ids = torch.tensor([token for encoding in tokenizer.encode_batch(texts) for token in encoding.ids])
    held_out = held_out_text()
    held_out_ids = torch.tensor(tokenizer.encode(held_out).ids)
    size = len(held_out.encode())
    xz = 8 * len(lzma.compress(held_out.encode(), preset=9 | lzma.PRESET_EXTREME)) / size
    model = shape.model()
    llama = None if origin is None else LlamaForCausalLM.from_pretrained(origin, dtype=torch.float32).eval()
    teacher = llama if shape is SIBLING else None
    if llama is not None and shape is MIXTURE:
        deal_neurons(llama, model)
    compiled_loss = torch.compile(loss_of, dynamic=False)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{len(ids):,} training tokens, {len(held_out_ids):,} held out, {parameters:,} parameters, xz {xz:.3f}")

    optimizers = optimizers_of(model)
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]

    def clock() -> float:
        return time.process_time() / torch.get_num_threads()

    begin = last_save = clock()
    steps, mean_loss, result = 0, float("nan"), {}
    while True:
        progress = (clock() - begin) / (60 * minutes)
        if progress >= 1 or clock() - last_save > 60 * checkpoint_minutes:
            result = {
                "bits_per_byte": bits_per_byte(model, held_out_ids, size),
                "xz_bits_per_byte": xz,
                "training_loss": mean_loss,
                "steps": steps,
                "tokens": steps * batch_tokens,
                "distinct_tokens": len(ids),
                "minutes": (clock() - begin) / 60,
                "finished": progress >= 1,
            }
            print(json.dumps(result), flush=True)
            save(model, tokenizer, output, shape, origin, result)
            last_save = clock()
            if progress >= 1:
                break
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * learning_rate_share(progress)
        length = context_length(progress)
        starts = torch.randint(len(ids) - length - 1, (batch_tokens // length,))
        windows = torch.stack([ids[start : start + length + 1] for start in starts])
        loss = compiled_loss(model, windows, teacher, getattr(torch, dtype))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(optimizers[-1].param_groups[0]["params"], 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        steps += 1
        mean_loss = loss.item() if steps == 1 else 0.98 * mean_loss + 0.02 * loss.item()
        if steps % 20 == 0:
            rate = steps * batch_tokens / (clock() - begin)
            print(f"step {steps} loss {mean_loss:.3f} progress {progress:.3f} {rate:,.0f} tokens/s", flush=True)


def save(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    output: Path,
    shape: Shape,
    origin: Path | None,
    run: Mapping[str, object],
) -> None:
    """Write the Hugging Face folder: fp16 weights, tokenizer, model card."""
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, model_max_length=CONTEXT
    ).save_pretrained(output)
    halves = {name: value.half() for name, value in model.state_dict().items()}
    half = shape.model().half()
    half.load_state_dict(halves)
    half.save_pretrained(output)
    rows = "\n".join(
        f"| {name.replace('_', ' ')} | {f'{value:.4f}' if isinstance(value, float) else value} |"
        for name, value in run.items()
    )
    parameters = sum(p.numel() for p in model.parameters())
    taught = (
        "It completes Python code, badly; it exists so that graphopt can be tried and tested on a model\n"
        "that has really learned something."
    )
    if origin is not None:
        taught = f"It drafts for `{origin.name}`, whose tokenizer it has and whose chances of the next token it learnt."
    kinds: dict[Kind, str] = {
        "llama": "A Llama",
        "hybrid": "Gated DeltaNet in three layers of four (Qwen3-Next)",
        "mixture": f"A Mixtral, {EXPERTS_PER_TOKEN} of {EXPERTS} experts for a token,",
    }
    optimizer_text = "Muon (lr 0.02) on the matrices, AdamW (lr 0.006) on the embedding and norms"
    if shape.kind == "mixture":
        assert origin is not None
        taught = f"It began as `{origin.name}`, the neurons of each MLP dealt to its experts."
        optimizer_text = "AdamW (lr 0.001)"
    (output / "README.md").write_text(
        f"""# {output.name}

{kinds[shape.kind]} of {parameters:,} parameters ({shape.layers} layers, {shape.hidden} wide, {shape.heads} query and
{shape.key_value_heads} KV heads of 64, SwiGLU of width {shape.inner}, tied embedding of {VOCABULARY} byte-level BPE
tokens, {CONTEXT} positions), trained from scratch by `tools/train/stdlib_lm.py` on the source text of the standard
library of Python {platform.python_version()} (PSF License). {taught}

Held out, with the test files named after them: {", ".join(f"`{name}`" for name in HELD_OUT)}.

| run | |
| --- | --- |
{rows}

{optimizer_text}, 2% warm-up, linear decay over the second half,
windows of {CONTEXT // 2} tokens and {CONTEXT} in the last fifth, {torch.get_num_threads()} CPU threads, torch
{torch.__version__}. `graphopt eval` on the held-out text gives the figures of the exported and of the optimized model.
"""
    )


if __name__ == "__main__":
    typer.run(main)
