from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from graphopt.runtime_ops.paged_attention.spec.layout import (
    STORAGES,
    latent_width,
    pack,
    pack_latents,
    store_tokens,
    width,
)
from tests.runtime_ops.hostile import Case, Tensor


def pools(numbers: np.ndarray, storage: str) -> dict[str, np.ndarray]:
    """Return keys, values and their scales, of numbers [2, N, Hk, P, D]."""
    found = {}
    for name, each in zip(("keys", "values"), numbers, strict=True):
        held, scales = store_tokens(each, storage)
        found[name] = pack(held, storage, are_keys=name == "keys")
        count, heads, tokens, _ = each.shape
        none = np.zeros(0, np.float32)
        found[f"{name[:-1]}_scales"] = none if scales is None else scales.reshape(count, tokens, heads)
    return {name: found[name] for name in ("keys", "values", "key_scales", "value_scales")}


def latents(numbers: np.ndarray, storage: str) -> dict[str, np.ndarray]:
    """Return keys, values and their scales, of latents [N, Hk, P, D]."""
    held, _ = store_tokens(numbers, storage)
    keys, values = pack_latents(held, storage)
    none = np.zeros(0, np.float32)
    return {"keys": keys, "values": values, "key_scales": none, "value_scales": none}


def choices(random: np.random.Generator, positions: list[int], most: int) -> np.ndarray:
    """Return positions that tokens at ``positions`` read, int32 [T, most]: from one to all that there are."""
    chosen = np.full((len(positions), most), -1, np.int32)
    for row, position in zip(chosen, positions, strict=True):
        count = random.integers(1, min(most, position + 1) + 1)
        row[:count] = np.sort(random.permutation(position + 1)[:count])
    return chosen


@st.composite
def honest(
    draw: st.DrawFn, storages: tuple[str, ...] = tuple(STORAGES), fed: tuple[type, ...] = (np.float32, np.float16)
) -> Case:
    """Requests of any lengths over pages in any order, some of which they share."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kv_heads, group, size = (
        draw(st.sampled_from([1, 2, 3])),
        draw(st.sampled_from([1, 2])),
        draw(st.sampled_from([32, 64])),
    )
    page, storage = draw(st.sampled_from([16, 32, 128])), draw(st.sampled_from(storages))
    size = {"int6": 64, "int4": size}.get(storage, size // 2)
    # long ones share so much that the kernel reads it for all of them together
    longest = draw(st.sampled_from([90, 90, 90, 400]))
    past = draw(st.lists(st.integers(0 if longest < 400 else 250, longest), min_size=1, max_size=4))
    new = draw(st.lists(st.integers(0, 9), min_size=len(past), max_size=len(past)).filter(any))
    needed = [-(-(p + n) // page) for p, n in zip(past, new, strict=True)]
    columns = max(needed) + draw(st.integers(0, 2))
    order = random.permutation(sum(needed) + draw(st.integers(0, 3)))
    table = np.full((len(past), columns), -1, np.int32)
    for row, count in enumerate(needed):
        table[row, :count] = order[sum(needed[:row]) : sum(needed[: row + 1])]
        shared = min(past[row], past[0]) // page if draw(st.booleans()) else 0  # full pages, of the past of both
        table[row, :shared] = table[0, :shared]
    may_be_latent = page >= 32 and STORAGES[storage].levels is None
    value_size = draw(st.sampled_from([0, 16])) if may_be_latent else 0
    tokens, like = sum(new), draw(st.sampled_from(fed))
    heads = kv_heads * group
    lead = draw(st.sampled_from([(tokens,), (1, tokens)]))

    def normal(*shape: int) -> np.ndarray:
        return random.standard_normal(shape)

    inputs = {
        "query": normal(*lead, heads * size).astype(like),
        "key": normal(*lead, kv_heads * size).astype(like),
        "value": normal(*(() if value_size else lead), 0 if value_size else kv_heads * size).astype(like),
        "starts": np.cumsum([0, *new]).astype(np.int32),
        "past": np.array(past, np.int32),
        "block_table": table,
        "sink_logits": normal(heads if draw(st.booleans()) else 0).astype(np.float32),
    }
    if value_size:
        inputs |= latents(normal(len(order), kv_heads, page, size), storage)
        assert inputs["keys"].shape[3] == latent_width(size, storage, page)
    else:
        inputs |= pools(normal(2, len(order), kv_heads, page, size), storage)
        assert inputs["keys"].shape[3] == width(size, storage)
    attributes = {
        "kv_heads": kv_heads,
        "window": draw(st.sampled_from([0, 1, 7, 100])),
        "scale": draw(st.sampled_from([0.25, 1.0])),
        "softcap": draw(st.sampled_from([0.0, 2.5])),
        "storage": storage,
    }
    if value_size:
        attributes["value_size"] = value_size
    if attributes["window"] and draw(st.booleans()):
        attributes["chunks"] = 1
    if not attributes["softcap"] and draw(st.booleans()):
        attributes["slopes"] = random.uniform(-0.1, 1, heads).astype(np.float32).tolist()
    if STORAGES[storage].levels is not None and draw(st.booleans()):
        attributes["key_feedback"] = 1
        # numbers on and below the diagonal are not read
        inputs["feedback"] = random.uniform(-0.5, 0.5, (kv_heads, size, size)).astype(np.float16)
    if STORAGES[storage].levels is not None and draw(st.booleans()):
        attributes["residuals"] = 1
    if value_size and not attributes["window"] and draw(st.booleans()):
        attributes["chooses"] = 1
        positions = [p + i for p, n in zip(past, new, strict=True) for i in range(n)]
        chosen = choices(random, positions, draw(st.sampled_from([1, 5, 40, 150])))
        inputs |= {"feedback": np.zeros(0, np.float16), "choice": chosen.reshape(*lead, -1)}
    return Case("PagedAttention", {name: Tensor(array, "fed") for name, array in inputs.items()}, attributes)
