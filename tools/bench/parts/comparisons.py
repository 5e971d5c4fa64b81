"""The peers that each engine of graphopt is compared with, and how many times as fast it is, round by round."""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch

from tools.bench.parts.rounds import Timing

Against = Mapping[str, tuple[str, ...]]
"""For a pattern of engines' names: patterns of their peers' names, one for each kind of peer."""

_NBITS, _ELSE = "onnxruntime-matmulnbits", ("openvino-*", "torch-bf16")
_FOUR = (f"{_NBITS}-4-*", "llama.cpp-q4*", *_ELSE)
_SIX = (f"{_NBITS}-8-*", "llama.cpp-q6*", *_ELSE)
_EIGHT = (f"{_NBITS}-8-*", "llama.cpp-q8*", *_ELSE)

# The first pattern that matches decides, here and below. A product after a Hadamard is compared with the product alone.
PRODUCTS: Against = {
    "graphopt-hadamard": ("copy",),
    "graphopt-hadamard-int4": ("graphopt-int4",),
    "graphopt-hadamard-w8a8": ("graphopt-w8a8",),
    "graphopt-hadamard-w4a8": ("graphopt-w4a8",),
    "graphopt-hadamard-w4a4": ("graphopt-w4a4",),
    "graphopt-int4*": _FOUR,
    "graphopt-nf4*": _FOUR,
    "graphopt-w4*": _FOUR,
    "graphopt-fp6*": _SIX,
    "graphopt-int8*": _EIGHT,
    "graphopt-w8a8": _EIGHT,
}

_FLOAT = ("onnxruntime-gqa-float32", "onnxruntime-attention*", "torch-float32*")
_HALF = ("onnxruntime-gqa-float16", "torch-bfloat16*", "llama.cpp-f16")
# No peer stores a cache as float8 on a CPU: it is compared with caches of as many bytes.
_FLOAT8 = ("graphopt-float16", "graphopt-int8", "onnxruntime-gqa-int8", "llama.cpp-q8_0")
_BYTE = ("onnxruntime-gqa-int8", "llama.cpp-q8_0")
_NIBBLE = ("onnxruntime-gqa-int4", "llama.cpp-q4_0")

# Attention over a part of the cache is compared with graphopt's own attention over all of it, too.
ATTENTION: Against = {
    "graphopt-float32": _FLOAT,
    "graphopt-float16": _HALF,
    "graphopt-bfloat16": _HALF,
    "graphopt-float8": _FLOAT8,
    "graphopt-int8": _BYTE,
    "graphopt-int4": _NIBBLE,
    "graphopt-float32-*": ("graphopt-float32", *_FLOAT),
    "graphopt-float16-*": ("graphopt-float16", *_HALF),
    "graphopt-bfloat16-*": ("graphopt-bfloat16", *_HALF),
    "graphopt-float8-*": ("graphopt-float8", *_FLOAT8),
    "graphopt-int8-*": ("graphopt-int8", *_BYTE),
    "graphopt-int4-*": ("graphopt-int4", *_NIBBLE),
}


@dataclass(frozen=True)
class Comparison:
    """How many times as fast as ``peer``, the fastest of its kind, ``engine`` is: the median over rounds of ratios."""

    case: Hashable
    engine: str
    peer: str
    ratio: float


def compare(case: Hashable, timings: Mapping[str, Timing], against: Against) -> Iterator[Comparison]:
    """Yield each engine of graphopt against the fastest of each kind of its peers."""
    for engine, timing in timings.items():
        kinds = next((kinds for pattern, kinds in against.items() if fnmatch(engine, pattern)), ())
        for kind in kinds:
            peers = [name for name in timings if fnmatch(name, kind)]
            if peers:
                peer = min(peers, key=lambda name: timings[name].median)
                rounds = zip(timings[peer].seconds, timing.seconds, strict=True)
                yield Comparison(
                    case,
                    engine,
                    peer,
                    statistics.median(peer_seconds / own_seconds for peer_seconds, own_seconds in rounds),
                )
