"""What checkpoints and exports of the tests are made by; fixtures in ``conftest.py`` make each once."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from graphopt.util.stdlib_text import held_out_text
from tests.families import HEADS, POSITIONS, SEQ2SEQ, TOWERS, VOCABULARY, make_model

END_OF_TEXT = "<|endoftext|>"
# What a checkpoint of the tests, and an export of it, is made by.
FOLDERS = ("tests/families.py", "tests/checkpoints.py", "graphopt/util/stdlib_text.py")
EXPORTS = (
    *FOLDERS,
    *(
        f"graphopt/{name}.py"
        for name in (
            "artifact/*",
            "graph/diagnostics",
            "graph/weights/safetensors_files",
            "models/*",
            "models/unrolling/*",
            "tasks/*",
            "tasks/seq2seq/*",
        )
    ),
)

# Families of which one layer is exported instead of two: what links two layers has no part that others here lack.
ONE_LAYER = frozenset(
    (
        *("mistral", "mistral_window", "qwen3", "opt", "stablelm", "olmo2", "granite", "cohere"),
        *("falcon", "falcon_new"),
        *("deepseek_v3", "gpt_oss"),
        *("mamba", "mamba2", "falcon_h1"),
        *("nomic_bert", "eurobert", "bert_classes", "roberta_tokens", "llama_classes", "distilbert_answers"),
        *("clip_text", "qwen3_embedder"),
        *("t5", "bart", "whisper"),
    )
)
# The family that is exported by an id on the hub.
HUB = "qwen3"


def write_checkpoint(family: str, folder: Path) -> None:
    """Write the Hugging Face folder of a family; three have a tokenizer."""
    model = make_model(family, 1 if family in ONE_LAYER else None)
    if family == "llama":
        # As checkpoints are: 16 bits, which the export must widen to 32.
        model = model.half()
    if family in ("llama", HUB):
        save_tokenizer(folder)
    if family == "bert" or family in HEADS | TOWERS | SEQ2SEQ:
        save_word_pieces(folder)
    if family == "whisper":
        from transformers import WhisperFeatureExtractor

        WhisperFeatureExtractor(feature_size=16).save_pretrained(folder)
    model.save_pretrained(folder)


def know_torchlib() -> None:
    """Let torch list its operators, and its exporter derive their signatures, once: a sixth of a small export."""
    import torch._export.utils
    from torch.onnx._internal.exporter import _registration, _schemas

    for module, name in (
        (torch._export.utils, "_materialize_cpp_cia_ops"),
        (_registration.onnxscript_apis, "get_torchlib_ops"),
        (_schemas, "op_signature_from_function"),
    ):
        if not hasattr(getattr(module, name), "cache_info"):
            setattr(module, name, functools.cache(getattr(module, name)))
    look_at_operators_first()
    remember_sizes()


def remember_sizes() -> None:
    """Let torch compute with sizes and decide about them once for equal expressions: a fifth of a small export.

    It asks at each node whether shapes fit and whether strides are those of contiguous memory; of 57 000 answers 1600
    are new. An answer holds for the version of a `ShapeEnv`, which changes with each guard and each bound that it adds.
    """
    from torch._C import _get_dispatch_mode, _TorchDispatchModeKey
    from torch._ops import _get_dispatch_mode_pre_dispatch
    from torch.fx.experimental import symbolic_shapes
    from torch.fx.experimental.sym_node import SymNode

    decide: Any = symbolic_shapes._guard_or
    if hasattr(decide, "__wrapped__"):
        return
    missing = object()

    def answers_of(shapes: Any) -> dict[Any, Any]:
        version, answers = vars(shapes).get("_answers", (None, {}))
        if version != shapes._version_counter:
            answers = {}
            shapes._answers = shapes._version_counter, answers
        return answers  # type: ignore[no-any-return]

    @functools.wraps(decide)
    def decide_once(size: Any, default: bool) -> bool:
        shapes = getattr(getattr(size, "node", None), "shape_env", None)
        if shapes is None:
            return bool(decide(size, default))
        key = size.node._expr, default
        answer = answers_of(shapes).get(key, missing)
        if answer is missing:
            answer = decide(size, default)  # which may change the version
            answers_of(shapes)[key] = answer
        return bool(answer)

    def compute_once(name: str) -> None:
        compute = getattr(SymNode, name)

        @functools.wraps(compute)
        def binary(self: Any, operand: Any) -> Any:
            proxy = _TorchDispatchModeKey.PROXY
            if self.shape_env is None or _get_dispatch_mode(proxy) or _get_dispatch_mode_pre_dispatch(proxy):
                return compute(self, operand)
            answers = answers_of(self.shape_env)
            key = name, self._expr, operand._expr, self.pytype, self._hint, operand._hint
            if key not in answers:
                answers[key] = compute(self, operand)
            return answers[key]

        setattr(SymNode, name, binary)

    symbolic_shapes._guard_or = decide_once
    for name in ("eq", "ne", "lt", "le", "gt", "ge", "mul", "sym_max", "and_", "or_"):
        compute_once(f"_{name}")


def look_at_operators_first() -> None:
    """Let onnxscript's rules pass by a node whose operator is not the pattern's last: a seventh of a small export.

    It would find the same, but only once it has made what a match is kept in, and counted the nodes of the graph.
    """
    from onnxscript.rewriter import _basics, _matcher

    matcher: Any = _matcher.SimplePatternMatcher
    match, mismatch = matcher.match, _basics.MatchResult().fail("the operator is another")
    if hasattr(match, "__wrapped__"):
        return

    @functools.wraps(match)
    def match_operator_first(self: Any, model: Any, graph: Any, node: Any, **options: Any) -> Any:
        possible = self.pattern.output_nodes[0].op.matches(node.op_type)
        return match(self, model, graph, node, **options) if possible else mismatch

    matcher.match = match_operator_first


def save_word_pieces(folder: Path) -> None:
    """Train a WordPiece tokenizer of :data:`VOCABULARY` tokens, which begins and ends each text as BERT's does."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=VOCABULARY, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([held_out_text()[:20_000]], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    token_by_role = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token"), special, strict=True))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=POSITIONS, **token_by_role)
    fast.save_pretrained(folder)


def save_tokenizer(folder: Path) -> None:
    """Train a byte-level BPE tokenizer of :data:`VOCABULARY` tokens and save it as transformers does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        [held_out_text()[:20_000]],
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, model_max_length=POSITIONS
    )
    fast.save_pretrained(folder)
