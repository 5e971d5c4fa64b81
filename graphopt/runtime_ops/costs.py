"""What products with stored codes take in onnxruntime's kernel and in graphopt's, as measured."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources

from pydantic import BaseModel, ConfigDict

from graphopt.graph.diagnostics import Fact, Rule

FILE = "costs.json"

NOT_MEASURED = Rule(
    "lower.not-measured", "no cost was measured for {bits} bits on {instructions}: onnxruntime's kernel stays"
)
MEASURED_COSTS = Rule(
    "lower.measured",
    "{ours_us:g} us against {theirs_us:g} us of MatMulNBits at its least advantage ({rows_of_x} row(s) of x, "
    "{rows} x {columns}, group {group}, {instructions})",
    tie="; about as fast, and the same bits for any number of rows",
    also=("bits",),
)
ESTIMATED_COSTS = Rule(
    "lower.estimated",
    "an estimate, nothing was measured: {ours_us:.3g} us against {theirs_us:.3g} us of float16 weights, by the bytes "
    "of {rows} x {columns} codes of {bits} bits at a nominal {bandwidth_tb:g} TB/s",
)

_NEAREST = {"avxvnni": "avx2"}

TIE = 0.05
"""How much slower graphopt's kernel may be and still be chosen: less than two runs of one benchmark differ by.

It has the same bits for any number of rows of x, which ``MatMulNBits`` has not, so that drafts never change a text: a
step of several tokens gives each the logits that it has alone."""

NOMINAL_BANDWIDTH = 3.35e12
"""Bytes per second of an H100's memory by its data sheet: what estimates of a product on a GPU are made with."""


class Cost(BaseModel):
    """One product, measured in both kernels in turns; weights come from memory, not from a cache.

    Attributes:
        bits: bits of a code.
        group: rows that share a scale.
        instructions: the instruction set that graphopt's kernel was held to.
        rows_of_x: rows that are multiplied at once: 1 in a decode step of one sequence.
        shape: rows and columns of the matrix.
        matmulnbits_us: median microseconds of onnxruntime's ``MatMulNBits``, activations int8.
        matmultable_us: median microseconds of ``MatMulTable``, activations int8.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    bits: int
    group: int
    instructions: str
    rows_of_x: int
    shape: tuple[int, int]
    matmulnbits_us: float
    matmultable_us: float


@dataclass(frozen=True)
class Choice:
    """Whether graphopt's kernel is the faster one, and the figures that say so."""

    is_faster: bool
    reason: Fact


class Costs(BaseModel):
    """A table of measured costs.

    Attributes:
        source: the command that measured them.
        machine: what it ran on.
        versions: what it ran.
        costs: the rows.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str
    machine: str
    versions: dict[str, str] = {}
    costs: tuple[Cost, ...]

    def compare(self, bits: int, instructions: str) -> Choice:
        """Return whether graphopt's kernel was as fast for codes of ``bits`` bits, whatever the group and rows of x.

        A kernel that wins a decode step and loses a prefill is not chosen: in no row measured may it be slower than
        :data:`TIE` allows.
        ``avxvnni`` is AVX2 with one more instruction: without costs of its own it goes by those of ``avx2``.
        """
        rows = [cost for cost in self.costs if (cost.bits, cost.instructions) == (bits, instructions)]
        if not rows and instructions in _NEAREST:
            return self.compare(bits, _NEAREST[instructions])
        if not rows:
            return Choice(False, NOT_MEASURED(bits=bits, instructions=instructions))
        worst = min(rows, key=lambda cost: cost.matmulnbits_us / cost.matmultable_us)
        reason = MEASURED_COSTS(
            bits=bits,
            ours_us=worst.matmultable_us,
            theirs_us=worst.matmulnbits_us,
            rows_of_x=worst.rows_of_x,
            rows=worst.shape[0],
            columns=worst.shape[1],
            group=worst.group,
            instructions=instructions,
            tie=1 <= worst.matmultable_us / worst.matmulnbits_us <= 1 + TIE or None,
        )
        return Choice(worst.matmultable_us <= (1 + TIE) * worst.matmulnbits_us, reason)


def estimate(rows: int, columns: int, bits: int) -> Choice:
    """Return what a decode step's product takes on a GPU if only bytes of codes count: an estimate, nothing measured.

    The other choice is float16 weights, as onnxruntime's CUDA provider multiplies what it has dequantized.
    """
    table_us, float16_us = (rows * columns * width / 8 / NOMINAL_BANDWIDTH * 1e6 for width in (bits, 16))
    bandwidth = NOMINAL_BANDWIDTH / 1e12
    figures = {"ours_us": table_us, "theirs_us": float16_us, "rows": rows, "columns": columns, "bits": bits}
    reason = ESTIMATED_COSTS(**figures, bandwidth_tb=bandwidth)
    return Choice(table_us < float16_us, reason)


@cache
def shipped_costs() -> Costs:
    """Return the costs that ship with the package; ``tools/bench/lower_costs.py`` measures them again."""
    return Costs.model_validate_json(resources.files(__package__).joinpath(FILE).read_text(encoding="utf-8"))
