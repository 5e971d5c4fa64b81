"""Measure the shipped model with sparse caches within its trained length, and how much of the cache is read.

    python tools/studies/sparse_text.py                     # 20000 tokens of held-out text; 3 minutes on two cores
    python tools/studies/sparse_text.py --tokens 5000 --json sparse_text.json

Text is scored in windows of the trained length, each token with half a window of context at least. Bits per byte are
bits per token over the bytes that a token of the text has on average. The pages that a query reads besides the first
and the newest tokens are counted by the operator's definition, on the queries and summaries of the graph itself, for
every 16th scored token of the first windows: the mean is over all layers and KV heads.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import numpy as np
import onnx_ir as ir
import typer
from rich.console import Console
from rich.table import Table

# Run as a script, Python looks for modules in tools/ only.
sys.path.insert(0, str(Path(__file__).parents[2]))
from graphopt.analysis.structure.paged_caches import kv_nodes
from graphopt.artifact import artifact
from graphopt.inference.session import Session
from graphopt.ort.session import open_session
from graphopt.passes.cache.sparse_kv import SparseKV
from graphopt.passes.lift.canonicalize import Canonicalize
from graphopt.runtime_ops.kv_attention.spec.policies.retrieval import Retrieval
from graphopt.tasks.ports import IntArray
from tools.bench.parts.held_out import nats_in_windows, open_shipped_model, optimize_artifact, windows
from tools.bench.parts.options import JsonFile

COUNTED_WINDOWS, COUNTED_STRIDE = 4, 16


def variants() -> list[tuple[str, SparseKV]]:
    """Return the measured steps with their titles."""
    retrieval = {"policy": "retrieval", "sinks": 16, "recent": 64, "page": 16}
    streaming = {"policy": "streaming", "sinks": 16, "page": 16}
    option_rows = []
    for summary in ("bounds", "mean"):
        common = {**retrieval, "summary": summary}
        option_rows.append((f"11 pages by {summary}", {**common, "budget": 11}))
        option_rows += [(f"mass {mass} by {summary}", {**common, "budget": 0, "mass": mass}) for mass in (0.9, 0.95)]
        option_rows += [
            (f"11 pages by {summary}, {channels} channels of 64", {**common, "budget": 11, "channels": channels})
            for channels in (32, 16)
        ]
    for recent in (240, 112):
        option_rows.append((f"streaming, 16 first and {recent} newest", {**streaming, "recent": recent}))
        option_rows.append((f"the same, compensated: {recent}", {**streaming, "recent": recent, "compensate": True}))
    return [(name, SparseKV.model_validate(options)) for name, options in option_rows]


def main(
    tokens: Annotated[int, typer.Option(min=2048, help="of held-out text, at most")] = 20000,
    json_file: JsonFile = None,
) -> None:
    """Export the shipped model, make each variant, score each, count the pages that it reads."""
    table = Table("", "bits per byte", "pages chosen", "tokens read of 1024, at most")
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary) / "float32"
        plain, text = open_shipped_model(source, tokens)
        ids, window = text.ids, plain.max_positions or len(text.ids)
        all_variants: list[tuple[str, SparseKV | None]] = [("dense", None), *variants()]
        for index, (name, step) in enumerate(all_variants):
            session, page_count, tokens_read = plain, None, window
            if step is not None:
                target = Path(temporary) / str(index)
                session = optimize_artifact(source, target, Canonicalize(), step, run=False)
                tokens_read = step.sinks + step.recent
                if step.policy == "retrieval":
                    page_count = pages_chosen(target, session, ids, window)
                    tokens_read += round(page_count * (step.page or 0))
            bits = text.bits_per_byte(nats_in_windows(session, ids, window))
            table.add_row(name, f"{bits:.4f}", "" if page_count is None else f"{page_count:.1f}", str(tokens_read))
            rows.append(
                {"what": name, "bits_per_byte": bits, "pages": page_count, "read": tokens_read, "tokens": len(ids)}
            )
            if json_file is not None:
                json_file.write_text(json.dumps(rows, indent=2) + "\n")
    Console().print(table)


def pages_chosen(folder: Path, session: Session, ids: IntArray, window: int) -> float:
    """Return how many pages a query of a retrieving head chooses, on average.

    Args:
        folder: the artifact.
        session: the same, open.
        ids: the text.
        window: tokens of a sequence.
    """
    model = artifact.read(folder).model
    queries = [node.inputs[0] for node in kv_nodes(model.graph)]
    model.graph.outputs.extend(value for value in queries if value is not None)
    counts: list[int] = []
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "model.onnx"
        ir.save(model, path, external_data="model.onnx.data")
        runner, interface = open_session(path), session.interface
        names = [value.name for value in queries if value is not None]
        summaries = [layer.port("summaries").replace("past_key_values", "present") for layer in interface.layers]
        for part in windows(ids, window)[:COUNTED_WINDOWS]:
            tokens = part[None, :-1]
            past = interface.empty_past(1, tokens.shape[1])
            outputs = runner.run([*names, *summaries], interface.feeds(tokens, np.ones_like(tokens), past))
            for layer, query, page_summaries in zip(interface.layers, outputs, outputs[len(names) :], strict=False):
                kv = layer.attributes
                split = query[0].reshape(tokens.shape[1], kv.kv_heads, -1, layer.head_size).astype(np.float64)
                for head in (head for head in range(kv.kv_heads) if kv.policy(head) == Retrieval.number):
                    for position in range(tokens.shape[1] // 2, tokens.shape[1], COUNTED_STRIDE):
                        pages = kv.policy_of(head).pages(kv, page_summaries[0, head], split[position, head], position)
                        counts.append(len(pages))
    return float(np.mean(counts))


if __name__ == "__main__":
    typer.run(main)
