from __future__ import annotations

from typing import Any

from tools.bench.lower_costs import read_costs


def row(engine: str, median: float, rows: int = 1) -> dict[str, Any]:
    case = {"kind": "product", "rows": rows, "inner": 4096, "outer": 4096, "group": 128}
    return {"case": case, "engine": engine, "median_us": median}


def test_kernels_are_paired_by_case_bits_and_group() -> None:
    rows = [
        row("graphopt-int4", 189.04),
        row("graphopt-int4", 400.0, rows=8),
        row("graphopt-fp6", 282.0),
        row("onnxruntime-matmulnbits-4-g128", 242.0),
        row("onnxruntime-matmulnbits-4-g32", 309.0),
        row("onnxruntime-matmulnbits-8-g128", 488.0),
    ]
    (cost,) = read_costs("avx512", {"machine": "a test", "rows": rows})
    assert (cost.bits, cost.group, cost.rows_of_x, cost.shape) == (4, 128, 1, (4096, 4096))
    assert (cost.matmultable_us, cost.matmulnbits_us, cost.instructions) == (189.0, 242.0, "avx512")
