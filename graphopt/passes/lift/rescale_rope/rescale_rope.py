"""Rotary positions of a frozen model are stretched, so that it reads longer texts than it was trained on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np
import onnx_ir as ir
from pydantic import Field

from graphopt.analysis.structure.ports import MAX_POSITIONS
from graphopt.analysis.structure.rotary import RotaryAngles, rotary_angles
from graphopt.errors import InputError
from graphopt.graph.diagnostics import Effect, Rule, Skip
from graphopt.graph.editing import shared_constant
from graphopt.numerics.rotations.claims import Claims
from graphopt.passes.base import Pass
from graphopt.passes.lift.rescale_rope.edits import multiply, name_with_suffix, turn_by
from graphopt.passes.lift.rescale_rope.methods import METHODS, Method, Positive, Radians, attention_factor, check

if TYPE_CHECKING:
    from graphopt.passes.context import Context, Ledger

RESCALING = Rule(
    "rescale_rope.rescaled",
    "{frequencies} rescaled by {method} for {factor:g} times the context",
    first="; not the first {first} tokens",
)
SCALING = Rule("rescale_rope.scaled", "{wave} of rotary angles is multiplied by {by:g}")
EXTENSION = Rule("rescale_rope.extended", "sequences may have {positions} tokens; they were trained with {trained}")
NO_EFFECT = Rule("rescale_rope.unchanged", "{method} with the factor {factor:g} leaves {frequencies} as they are")

_POSITIONS = "position_ids"


class RescaleRope(Pass):
    """Let a model with rotary positions read longer texts than it was trained on, by other frequencies.

    before::

        RotaryEmbedding(x, Cos(p w), Sin(p w))                          token p, frequencies w_0 = 1 > w_1 > ...

    after::

        RotaryEmbedding(x, m Cos(p w'), m Sin(p w'))
        RotaryEmbedding(x, m Cos(p w''), m Sin(p w''))                  w'' = Where(p < first, w, w')

    Queries and keys turned by p w meet as q^T R((p' - p) w) k: what training has shown are angles (p' - p) w_i for
    distances up to the trained length L. For s times the length, w' makes the slow pairs slower, so that their angles
    stay among those, and changes the fast pairs little, which tell neighbours apart and have shown all angles. With
    n pairs, r_i = L w_i / (2 pi) rounds of pair i within L tokens, and g going from 0 to 1 in a line, w'_i is::

        linear     w_i / s                          position interpolation, Chen et al. 2023
        ntk        w_i s^(-i / (n - 1))             NTK-aware, bloc97 2023: the base b becomes b s^(2n / (2n - 2))
        yarn       w_i (1 - g_i) + g_i w_i / s      YaRN, Peng et al. 2023, section 3.2: g in i, r from 32 to 1
        llama3     w_i (1 - g_i) + g_i w_i / s      Llama 3.1, 2024: g in r, from 4 to 1
        longrope   w_i / factors_i                  LongRoPE, Ding et al. 2024, section 3: given numbers
        truncated  w_i;  2 pi / (16 L);  0          Giraffe, Pal et al. 2023: r_i >= 1;  between;  r_i <= 1/8

    m is the attention factor: scores grow by m^2, against the softmax over more tokens being flatter. yarn has
    m = 0.1 ln s + 1, longrope m = sqrt(1 + ln s / ln L), the others 1. LongRoPE also leaves the first tokens of a
    sequence as they were (``first``).

    The metadata of the model then says s L positions, and with it the manifest, ``genai_config.json`` and how far
    caches may grow. A factor of 1 changes nothing, which the certificate proves. All rotary embeddings are rescaled or
    none: where the angles of one are not understood the step is refused, and the error names it. Models that mix bases
    (Gemma 3) have all of them rescaled.

    Attributes:
        method: which formula, see :class:`RescaleRope`.
        factor: s, by which the context is to grow. 1 changes nothing.
        trained: L, tokens of a sequence in training; ``None`` for the positions that the model has now.
        attention_factor: what cosines and sines are multiplied by, so that scores grow by its square; ``None`` for
            what the method's authors use: 0.1 ln s + 1 for yarn, sqrt(1 + ln s / ln L) for longrope, 1 for the others.
        beta_fast: of yarn: pairs that go round more often within L are kept.
        beta_slow: of yarn: pairs that go round less often are divided by s.
        low_freq_factor: of llama3: pairs that go round less often are divided by s.
        high_freq_factor: of llama3: pairs that go round more often are kept.
        factors: of longrope: what each frequency is divided by, one number for each pair.
        first: of longrope: tokens at the start that keep their trained angles.
        kept: of truncated: pairs that go round at least so often within L are kept.
        stopped: of truncated: pairs that go round at most so often no longer turn.
        constant: of truncated: how often the pairs between go round.
    """

    name: ClassVar[str] = "rescale_rope"
    effect: ClassVar[Effect] = "lossy"
    after: ClassVar[tuple[str, ...]] = ("canonicalize",)

    method: Method = "yarn"
    factor: Annotated[float, Field(ge=1, le=1 << 20)] = 2.0
    trained: Annotated[int, Field(ge=2)] | None = None
    attention_factor: Positive | None = None
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    low_freq_factor: Positive = 1.0
    high_freq_factor: Positive = 4.0
    factors: tuple[Positive, ...] = ()
    first: Annotated[int, Field(ge=0, le=1 << 30)] = 0
    kept: Annotated[float, Field(ge=0)] = 1.0
    stopped: Annotated[float, Field(ge=0)] = 1 / 8
    constant: Annotated[float, Field(ge=0)] = 1 / 16

    def rewrite(self, model: ir.Model, context: Context) -> None:
        """Rescale the frequencies of all rotary embeddings.

        Raises:
            InputError: an embedding turns by angles that are not understood, or the options do not fit the model.
        """
        check(self)
        graph, ledger = model.graph, context.ledger
        rotary = rotary_angles(graph)
        if isinstance(rotary, Skip):
            raise InputError(
                f"rotary positions cannot be rescaled: {rotary.reason}",
                node=rotary.where,
                remedy="put the step `canonicalize` in front; if it is there, export the model from its checkpoint",
            )
        max_positions = model.metadata_props.get(MAX_POSITIONS) or context.max_positions
        trained_length = self.trained or (None if max_positions is None else int(max_positions))
        scale, scaled_waves = attention_factor(self, trained_length), set[ir.Node]()
        old = [angles.radians for angles in rotary]
        # Whatever does not fit is refused before anything is changed.
        new_frequencies = [w if self.factor == 1 else self._by_method(w, trained_length) for w in old]
        for angles, new in zip(rotary, new_frequencies, strict=True):
            is_changed = self._turn(graph, angles, new, ledger)
            for wave in angles.waves:
                if scale != 1 and wave not in scaled_waves:
                    scaled_waves.add(wave)
                    number = _number(graph, "attention_factor", scale, wave.outputs[0])
                    ledger.changed(multiply(graph, wave, number), SCALING(wave=wave.op_type, by=scale), [wave])
            if not is_changed and scale == 1:
                figures = {"method": self.method, "factor": self.factor}
                ledger.skipped(angles.product, NO_EFFECT(frequencies=angles.frequencies.name, **figures))
        if self.factor != 1 and trained_length is not None:
            positions = int(trained_length * self.factor)
            model.metadata_props[MAX_POSITIONS] = str(positions)
            ledger.report_change(_POSITIONS, EXTENSION(positions=positions, trained=trained_length))
        if not ledger.report.changes:
            ledger.report.claims = Claims()

    def _by_method(self, w: Radians, trained_length: int | None) -> Radians:
        return METHODS[self.method](w, self, trained_length)

    def _turn(self, graph: ir.Graph, angles: RotaryAngles, new: Radians, ledger: Ledger) -> bool:
        """Give ``angles`` the frequencies ``new``; return whether they are others than before."""
        weight, product, options = angles.frequencies, angles.product, self
        assert weight.const_value is not None
        old_frequencies = weight.const_value.numpy()
        array = new.astype(old_frequencies.dtype).reshape(old_frequencies.shape)
        if np.array_equal(array, old_frequencies):
            return False
        first_tokens = _number(graph, "first_tokens", options.first, angles.positions) if options.first else None
        turn_by(graph, angles, shared_constant(graph, name_with_suffix(weight.name), array), first_tokens)
        figures = {"method": options.method, "factor": options.factor, "first": options.first}
        ledger.changed(product, RESCALING(frequencies=weight.name, **figures), [product, weight])
        return True


def _number(graph: ir.Graph, name: str, number: float, neighbour: ir.Value) -> ir.Value:
    """Return a constant of one number, of the type that ``neighbour`` has."""
    dtype = neighbour.dtype or ir.DataType.FLOAT
    return shared_constant(graph, f"{name}.{dtype.name.lower()}", np.array(number, dtype.numpy()))
