"""The exported graph against transformers' own forward: same tokens, same cache, same logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from graphopt.analysis.interface import Array, Interface, IntArray
from graphopt.errors import MissingDependencyError, VerificationError
from graphopt.models.trace import import_export_packages, quiet
from graphopt.runtime import import_onnxruntime, session_of
from graphopt.verify import Check

TOLERANCE = 1e-4
"""Largest difference of logits allowed, relative to the largest logit: a hundred times what float32 summed in another
order makes of a few dozen layers, a hundredth of what one wrong mask or position makes of a single one."""

# A model larger than this is not run a second time beside torch's copy.
_LARGEST = 2 << 30
# Sequences, tokens of the longest, tokens of it that come one at a time, and padding on the left of each sequence.
_TOKENS, _STEPS, _PADDING = 12, 2, (0, 5)


def check_agreement(model: Any, program: ir.Model, size: int) -> Check:
    """Run ``program`` in onnxruntime and ``model`` in torch on random tokens, and compare the logits.

    A batch of two prompts, one of them padded, is read at once onto an empty cache and continued step by step.

    Args:
        model: a causal language model of transformers.
        program: the graph that was exported from it.
        size: bytes of its weights.

    Returns:
        The largest difference relative to the largest logit, or why there is none.

    Raises:
        VerificationError: the logits differ by more than :data:`TOLERANCE`.
    """
    check = Check(name="agrees with transformers", after="export", status="not covered", reason="")
    if size > _LARGEST:
        return check.model_copy(update={"reason": f"the weights take {size} bytes, too many to run the model twice"})
    try:
        import_onnxruntime()
    except MissingDependencyError as error:
        return check.model_copy(update={"reason": str(error)})
    longest = model.config.get_text_config().vocab_size
    ids = np.random.default_rng(0).integers(0, longest, (len(_PADDING), _TOKENS))
    mask = (np.arange(_TOKENS) >= np.array(_PADDING)[:, None]).astype(np.int64)
    with session_of(program) as session:
        got = _graph_logits(session, ids, mask)
    expected = _torch_logits(model, ids, mask)
    real = mask.astype(bool)
    scale = float(np.abs(expected[real]).max())
    difference = float(np.abs(got - expected)[real].max()) / scale
    figures = {"largest logit change, relative": difference, "tolerance": TOLERANCE, "tokens": float(mask.sum())}
    if not difference <= TOLERANCE:
        raise VerificationError(
            f"the exported graph does not agree with transformers: logits differ by {difference:.1e} of the largest",
            remedy="nothing was written; this architecture is exported wrongly, please report it",
        )
    return check.model_copy(
        update={
            "status": "measured",
            "reason": "onnxruntime and torch on the same random tokens, padded and with a cache",
            "figures": figures,
        }
    )


def _graph_logits(session: Any, ids: IntArray, mask: IntArray) -> Array:
    interface = Interface.of_session(session)
    past = interface.empty_past(len(ids))
    logits: list[Array] = []
    for start, end in _pieces():
        feeds = interface.feeds(ids[:, start:end], mask[:, :end], past)
        outputs = session.run(["logits", *interface.present], feeds)
        logits.append(outputs[0])
        past = dict(zip(interface.past, outputs[1:], strict=True))
    return np.concatenate(logits, axis=1)


def _torch_logits(model: Any, ids: IntArray, mask: IntArray) -> Array:
    """Return the logits of one forward over all tokens, without a cache."""
    torch, _ = import_export_packages()
    positions = np.maximum(mask.cumsum(-1) - 1, 0)
    with torch.no_grad(), quiet():
        output = model(
            input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(mask), position_ids=torch.from_numpy(positions)
        )
    logits: Array = output.logits.numpy()
    return logits


def _pieces() -> list[tuple[int, int]]:
    prompt = _TOKENS - _STEPS
    return [(0, prompt), *((end - 1, end) for end in range(prompt + 1, _TOKENS + 1))]
