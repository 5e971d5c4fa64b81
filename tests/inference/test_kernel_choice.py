from __future__ import annotations

from graphopt.graph.diagnostics import Change, PassReport, Skip
from graphopt.inference.kernel_choice import elsewhere
from graphopt.passes.lower.lower import PACKING
from graphopt.runtime_ops.costs import Cost, Costs
from graphopt.util.targets import InstructionSet


def cost(bits: int, instructions: str, ort_us: float, graphopt_us: float) -> Cost:
    shape, group = (4096, 4096), 128
    return Cost(
        bits=bits,
        group=group,
        instructions=instructions,
        rows_of_x=1,
        shape=shape,
        matmulnbits_us=ort_us,
        matmultable_us=graphopt_us,
    )


COSTS = Costs(
    source="a test",
    machine="none",
    costs=(
        cost(4, "avx512", 300, 200),
        cost(8, "avx512", 100, 200),
        cost(4, "avx2", 300, 600),
        cost(8, "avx2", 250, 200),
    ),
)


def lowering_reports(instructions: InstructionSet, four: int = 3, eight: int = 1) -> list[PassReport]:
    """Return what passes report where `lower` chooses for so many products of 4 and of 8 bits."""
    report = PassReport(name="lower", effect="lossy")
    for bits, count in ((4, four), (8, eight)):
        choice = COSTS.compare(bits, instructions)
        for _ in range(count):
            if choice.is_faster:
                description = PACKING(activations="int8", group=32, reason=choice.reason)
                report.changes.append(Change(where="a", what=description))
            else:
                # what `lower` leaves to onnxruntime, it reports so
                report.skips.append(Skip(where="a", reason=choice.reason))
    return [PassReport(name="lower", effect="lossy"), report, PassReport(name="compact_scales", effect="exact")]


def test_each_kernel_that_is_slower_here_is_told_with_what_it_costs() -> None:
    remark = elsewhere(lowering_reports("avx512"), "avx512", "avx2", COSTS)
    assert str(remark) == (
        "kernels were chosen for avx512 and this machine has avx2: "
        "3 product(s) of 4 bits run by graphopt's kernel, which was measured to take up to 2 times as long as "
        "onnxruntime's; 1 product(s) of 8 bits run by onnxruntime's kernel, which was measured to take at least 1.2 "
        "times as long as graphopt's. Optimizing again with --target ort-cpu:avx2 chooses for it"
    )


def test_what_was_never_measured_here_is_told_too() -> None:
    assert "3 product(s) of 4 bits run by graphopt's kernel, which was not measured here" in str(
        elsewhere(lowering_reports("avx512"), "avx512", "scalar", COSTS)
    )


def test_what_costs_nothing_is_not_told() -> None:
    assert elsewhere(lowering_reports("avx512"), "avx512", "avx512", COSTS) is None
    assert elsewhere(lowering_reports("avx2"), "avx2", "avxvnni", COSTS) is None
    assert elsewhere(lowering_reports("avx512", four=0, eight=0), "avx512", "avx2", COSTS) is None
    assert elsewhere([], "avx512", "avx2", COSTS) is None
    tie = COSTS.model_copy(update={"costs": (*COSTS.costs[:3], cost(8, "avx2", 200, 206))})
    assert tie.compare(8, "avx2").is_faster
    assert elsewhere(lowering_reports("avx512", four=0), "avx512", "avx2", tie) is None


def test_a_report_read_from_a_manifest_tells_the_same() -> None:
    reports = [PassReport.model_validate_json(report.model_dump_json()) for report in lowering_reports("avx512")]
    assert elsewhere(reports, "avx512", "avx2", COSTS) == elsewhere(lowering_reports("avx512"), "avx512", "avx2", COSTS)
