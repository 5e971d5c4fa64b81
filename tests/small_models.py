"""Small models to test with, whose right answers can be worked out by hand."""

from __future__ import annotations

from pathlib import Path

import onnx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

BOS = "<s>"


def byte_tokenizer(characters: str, *, bos: bool = True) -> Tokenizer:
    """Return a byte-level tokenizer with one token per byte of ``characters``; token 0 is BOS, set before each text."""
    alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    symbols = [symbol for symbol, _ in alphabet.pre_tokenize_str(characters)]
    vocabulary = {BOS: 0} | {symbol: number for number, symbol in enumerate(sorted(set("".join(symbols))), start=1)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.add_special_tokens([BOS])
    tokenizer.pre_tokenizer = alphabet
    tokenizer.decoder = decoders.ByteLevel()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    return tokenizer


def counting_model(folder: Path, *, cache: bool = True, vocabulary: int = 8) -> Path:
    """Write a model without a mask whose most likely token after t is t + 1, and after the last token the first.

    Its logits are 9 at the next token and 0 elsewhere. Its cache, if it has one, is kept but never looked at.
    """
    past = ', float[batch, 1, past, 1] "past_key_values.0.key"' if cache else ""
    present = ', float[batch, 1, total, 1] "present.0.key"' if cache else ""
    keep = (
        """fresh = Cast<to = 1>(input_ids)
           heads = Constant<value_ints = [1, 3]>()
           added = Unsqueeze(fresh, heads)
           "present.0.key" = Concat<axis = 2>("past_key_values.0.key", added)"""
        if cache
        else ""
    )
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 21]>
        counting (int64[batch, length] input_ids{past}) => (float[batch, length, {vocabulary}] logits{present}) {{
           one = Constant<value_int = 1>()
           width = Constant<value_int = {vocabulary}>()
           more = Add(input_ids, one)
           following = Mod(more, width)
           values = Constant<value_floats = [0.0, 9.0]>()
           logits = OneHot(following, width, values)
           {keep}
        }}"""
    )
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(model, folder / "model.onnx")
    return folder
