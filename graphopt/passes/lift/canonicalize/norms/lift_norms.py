"""Norms by meaning: what computes a norm, however an exporter spells it, becomes the standard op.

    x / sqrt(mean(x^2) + epsilon) * gain                            ->   RMSNormalization(x, gain; epsilon)
    (x - mean(x)) / sqrt(variance(x) + epsilon) * gain + bias       ->   LayerNormalization(x, gain, bias; epsilon)

What a spelling computes is found out by running it, as for masks: the part of the graph between one value and another,
around a mean along the last axis, is cut out and run on rows of all sizes (:mod:`.region`, :mod:`.run`). If it is a
norm, its gain, bias and epsilon follow from what comes out, and all rows must agree with the definition
(:mod:`.meaning`). So casts, powers, products and sums may stand in any order: a gain before or behind a cast, as
1 + gain, a reciprocal of a root. What divides by a root and is no norm (an epsilon outside of the root, a floor under
it) is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from graphopt.graph.diagnostics import Fact, Rule
from graphopt.graph.editing import replace, shared_constant
from graphopt.graph.weights import new_weight
from graphopt.passes.lift.canonicalize.norms.meaning import Norm, Rows, understand
from graphopt.passes.lift.canonicalize.norms.region import (
    NORMS,
    OTHER_READ,
    TOO_LONG,
    Region,
    constants,
    ends,
    region_of,
    seeds,
    takes_root,
    why_not_last_axis,
)
from graphopt.passes.lift.canonicalize.norms.run import RESHAPES, Regions

if TYPE_CHECKING:
    from graphopt.passes.context import Context, Ledger

NORM_LIFT = Rule("canonicalize.norm-lifted", "{nodes} nodes that compute a norm of {width} numbers became {kind}")
NO_NORM = Rule("canonicalize.no-norm", "a mean and a root that make no norm: {why}")
WIDTH_UNKNOWN = Rule("canonicalize.norm-width-unknown", "the graph does not state the width of {tensor}")
NO_BIAS = Rule("canonicalize.norm-has-no-bias", "an RMSNormalization has no bias")
IMPRECISE = Rule("canonicalize.norm-imprecise", "in {dtype} it is off by {off}, more than rounding explains")


_WEAK = tuple(rule.code for rule in (OTHER_READ, RESHAPES, TOO_LONG, WIDTH_UNKNOWN))


def lift_norms(model: ir.Model, context: Context) -> None:
    """Lift every norm of the graph that is spelled out; the opset must be 23 or later."""
    graph, ledger = model.graph, context.ledger
    with Regions(context.runner) as regions:
        for seed in seeds(graph):
            if seed.graph is None:
                continue  # a norm around another seed took it along
            position = {node: number for number, node in enumerate(graph)}
            match = _largest(seed, position, regions)
            if isinstance(match, Fact):
                ledger.skipped(seed, NO_NORM(why=match))
            elif match is not None:
                _lift(graph, seed, *match, ledger)


def _largest(seed: ir.Node, position: dict[ir.Node, int], regions: Regions) -> tuple[Region, Norm] | Fact | None:
    """Return the largest region around ``seed`` that is a norm, or why none is, or ``None`` without a candidate."""
    found_ends = ends(seed, position)
    reasons = [why_not_last_axis(seed)] if found_ends else []
    for y in found_ends if reasons == [None] else ():
        region = region_of(seed, y, position)
        if isinstance(region, Fact):
            reasons.append(region)
            continue
        if [node.op_type for node in region.nodes] in ([norm] for norm in NORMS):
            return None
        if not any(map(takes_root, region.nodes)):
            continue
        match = _meaning(region, regions)
        if isinstance(match, Norm):
            return region, match
        reasons.append(match)
    # A reason that is about a region too large or not made of rows says less than one about a region that was run.
    known_reasons = sorted(
        (reason for reason in reasons if reason is not None), key=lambda reason: reason.code in _WEAK
    )
    return known_reasons[0] if known_reasons and seed.op_type not in NORMS else None


def _meaning(region: Region, regions: Regions) -> Norm | Fact:
    """Return the norm that ``region`` computes, in float64 and, to within rounding, in its own types, or why not."""
    n = region.x.shape[-1] if region.x.shape is not None and len(region.x.shape) else None
    if not isinstance(n, int):
        return WIDTH_UNKNOWN(tensor=region.x.name)
    norm = understand(lambda rows: regions.run(region, rows, wide=True), n)
    if isinstance(norm, Fact):
        return norm
    if norm.kind == "RMSNormalization" and norm.bias is not None:
        return NO_BIAS()
    return _why_unsound(region, norm, n, regions) or norm


def _why_unsound(region: Region, norm: Norm, n: int, regions: Regions) -> Fact | None:
    """Return where ``region``, run in its own types, is further from ``norm`` than rounding explains, or ``None``."""
    dtype = region.x.dtype or ir.DataType.FLOAT
    unit = float(dtype.finfo.eps) / 2 if hasattr(dtype, "finfo") else float(np.finfo(dtype.numpy()).eps) / 2
    sizes = (0.1, 1.0, 10.0) if dtype.bitwidth < ir.DataType.FLOAT.bitwidth else (1e-3, 1.0, 1e4)
    x = np.concatenate([size * np.random.default_rng(1).standard_normal((4, n)) for size in sizes])
    x = x.astype(dtype.numpy())
    y = regions.run(region, x, wide=False)
    if isinstance(y, Fact):
        return y
    error: Rows = np.abs(y.astype(np.float64) - norm.apply(x))
    if (error <= norm.bound(x, unit, len(region.nodes))).all():
        return None
    return IMPRECISE(dtype=dtype.name, off=f"{error.max():.1e}")


def _lift(graph: ir.Graph, seed: ir.Node, region: Region, norm: Norm, ledger: Ledger) -> None:
    stem = seed.name if seed.op_type in NORMS else f"{seed.name}.{norm.kind}"
    n, dtype = len(norm.gain), region.x.dtype or ir.DataType.FLOAT
    numbers = [norm.gain] if norm.bias is None else [norm.gain, norm.bias]
    inputs = [region.x]
    for array, port in zip(numbers, ("gain", "bias"), strict=False):
        inputs.append(_vector(graph, region, array.astype(dtype.numpy()), f"{stem}.{port}"))
    norm_node = ir.node(norm.kind, inputs, {"axis": -1, "epsilon": norm.epsilon}, name=stem)
    last = region.y.producer()
    assert last is not None
    replace(last, norm_node)
    ledger.changed(norm_node, NORM_LIFT(nodes=len(region.nodes), width=n, kind=norm.kind), [*region.nodes, *inputs[1:]])


def _vector(graph: ir.Graph, region: Region, array: Rows, name: str) -> ir.Value:
    """Return a constant that holds ``array``: the one that the region reads, where that is it."""
    for value in constants(region):
        constant = None if value.const_value is None else value.const_value.numpy()
        if (
            constant is not None
            and constant.shape == array.shape
            and constant.dtype == array.dtype
            and _is_close(constant, array)
        ):
            return value
    if (array == 1).all():
        return shared_constant(graph, f"unit_gain.{len(array)}.{array.dtype}", array)
    return new_weight(graph, name, ir.tensor(array, name=name))


def _is_close(constant: Rows, array: Rows) -> bool:
    """Return whether two arrays differ by a unit in the last place at most: one was solved for."""
    return bool((np.abs(constant - array) <= np.finfo(array.dtype).eps * np.abs(constant)).all())
