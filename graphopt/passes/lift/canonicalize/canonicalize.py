"""What exporters spell out becomes the standard ops for it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, ClassVar

from onnx_ir.passes.common import RemoveUnusedNodesPass

from graphopt.errors import InputError
from graphopt.graph.diagnostics import Effect, Rule
from graphopt.passes.base import Pass
from graphopt.passes.lift.canonicalize.attention import group_heads, take_cache
from graphopt.passes.lift.canonicalize.cleanup import merge_and_prune, read_invariants_outside, split_gemm
from graphopt.passes.lift.canonicalize.flat_heads import take_heads_apart
from graphopt.passes.lift.canonicalize.float_experts import lift_float_experts
from graphopt.passes.lift.canonicalize.fused_activations import lift_fused_activations
from graphopt.passes.lift.canonicalize.fused_norms import lift_fused_norms
from graphopt.passes.lift.canonicalize.group_query import lift_group_query
from graphopt.passes.lift.canonicalize.layouts import store_layouts
from graphopt.passes.lift.canonicalize.masks import lift_masks
from graphopt.passes.lift.canonicalize.merged_heads import unfold_heads
from graphopt.passes.lift.canonicalize.multi_head import lift_multi_head
from graphopt.passes.lift.canonicalize.norms import lift_norms
from graphopt.passes.lift.canonicalize.recurrences.lift_recurrences import lift_recurrences
from graphopt.passes.lift.canonicalize.reshapes import drop_idle_casts, drop_idle_reshapes, unflatten_products
from graphopt.passes.lift.canonicalize.rotary import lift_rotary
from graphopt.passes.lift.canonicalize.rotary_tables import Angles, lift_rotary_tables
from graphopt.passes.lift.canonicalize.scatters import lift_scatters
from graphopt.passes.lift.canonicalize.scores import lift_scores
from graphopt.passes.lift.canonicalize.shapes import state_shapes
from graphopt.passes.phases import CANONICAL_OPSETS
from graphopt.runtime_ops import bodies_aside

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphopt.passes.context import Context, Ledger

OPSET_RAISED = Rule("canonicalize.opset-raised", "opset {opset} raised to {to}")


class Canonicalize(Pass):
    """Lift what exporters spell out to the standard ops of opset 23.

    before::

        k = Reshape(Expand(Unsqueeze(Concat(past_k, new_k))))            heads repeated per query head
        y = Where(<no key>, 0, Attention(q, k, v, <mask arithmetic>))
        n = Mul(Div(x, Sqrt(Add(ReduceMean(Pow(x, 2)), epsilon))), gain)
        m = RMSNormalization(Sub(x, ReduceMean(x)), gain)
        r = Add(Mul(x, c), Mul(Concat(Neg(x2), x1), s))                  c, s: Cos, Sin of Concat(f, f)
        e = MatMul(a, Squeeze(Split(stack)[i]))                          stack: the matrices of all experts
        f = ScatterND(ScatterND(empty, [0 .. a], p), [a ..], q)

    after::

        y, present_k, present_v = Attention(q, new_k, new_v, <padding>, past_k, past_v; is_causal=1)
        n = RMSNormalization(x, gain; epsilon)
        m = LayerNormalization(x, gain; epsilon)
        r = RotaryEmbedding(x, Cos(f), Sin(f))
        e = MatMul(a, stack.i)
        f = Concat(p, q)

    A ``Scan`` or ``Loop`` whose step is a linear recurrence (linear attention, state space models, delta rules) becomes
    ``ai.graphopt::LinearRecurrence``: what its step means is found out by running it.

    Also: onnxruntime's own fused ops (``GroupQueryAttention``, ``MultiHeadAttention``, norms with a sum in front,
    ``FastGelu``, ``MoE``) become what they fuse, what no step of a ``Loop`` changes is read from outside of it,
    constants become initializers, ``Gemm`` becomes ``MatMul`` and ``Add`` without reshapes around it, every weight is
    stored in the layout it is read in, repeated computations are merged. SiLU stays ``Mul(x, Sigmoid(x))``: onnxruntime
    fuses that into one kernel, and has none for the standard ``Swish`` of opset 24.
    """

    name: ClassVar[str] = "canonicalize"
    effect: ClassVar[Effect] = "exact"

    def requires(self, model: ir.Model) -> None:
        """Demand nothing: this pass makes what the others require."""

    def rewrite(self, model: ir.Model, context: Context) -> None:
        """Run the lifts in order; bodies of our operators stay as they are."""
        with bodies_aside(model):
            _lift(model, context)


def _lift(model: ir.Model, context: Context) -> None:
    """Run the lifts in order; each leaves the graph valid."""
    ledger = context.ledger
    raise_opset(model, ledger)
    merge_and_prune(model, ledger)
    read_invariants_outside(model, ledger)
    state_shapes(model, ledger)
    if lift_recurrences(model, context):
        merge_and_prune(model, ledger)
    split_gemm(model, ledger)
    store_layouts(model, ledger)
    drop_idle_reshapes(model, ledger)
    drop_idle_casts(model, ledger)
    unflatten_products(model, ledger)
    lift_scatters(model, ledger)
    lift_fused_norms(model, ledger)
    lift_fused_activations(model, ledger)
    lift_float_experts(model, ledger)
    lift_norms(model, context)
    lift_rotary(model, ledger)
    angles = Angles(model, ledger)
    lift_rotary_tables(model, angles, ledger)
    lift_group_query(model, angles, context)
    lift_multi_head(model, ledger)
    take_heads_apart(model, ledger)
    unfold_heads(model, ledger)
    lift_scores(model, ledger)
    group_heads(model, ledger)
    if context.task.caches:
        take_cache(model, ledger)
    lift_masks(model, context)
    RemoveUnusedNodesPass()(model)


def raise_opset(model: ir.Model, ledger: Ledger) -> None:
    """Bring an older graph to opset 23.

    Raises:
        InputError: onnxruntime cannot load the opset, or the converter fails.
    """
    opset, oldest, newest = model.opset_imports.get("", 0), CANONICAL_OPSETS[0], CANONICAL_OPSETS[-1]
    if opset > newest:
        raise InputError(
            f"opset {opset} is newer than onnxruntime can load", remedy=f"export it with opset {newest} or older"
        )
    if opset >= oldest:
        return
    from onnxscript import version_converter

    remedy = f"export the model with opset {oldest}"
    log = logging.getLogger("onnxscript.version_converter")
    level = log.level
    try:
        # It warns that opsets before 18 are raised by onnx itself, which is what the fallback is for.
        log.setLevel(logging.ERROR)
        version_converter.convert_version(model, oldest, fallback=True)
    except Exception as error:
        raise InputError(f"opset {opset} cannot be raised to {oldest} ({error})", remedy=remedy) from error
    finally:
        log.setLevel(level)
    if model.opset_imports.get("") != oldest:
        raise InputError(f"opset {opset} cannot be raised to {oldest}", remedy=remedy)
    ledger.report_change("graph", OPSET_RAISED(opset=opset, to=oldest))
