"""Edit a span of a text in a cache, beside reading the new text: time, and the KL of the next tokens.

    python tools/studies/cache_editing.py                            # SmolLM2, 7936 tokens; `make real` fetches it
    python tools/studies/cache_editing.py --recipe kv4 --edit 48:16 --reread 0,128

The text is the documentation of the Python language. A span in its middle (`--behind`: how many tokens come after it)
is replaced by tokens from elsewhere in the text (`--edit OLD:NEW`: numbers of tokens). Then the next tokens are fed, 16
at a time, after the edited states, after the states of the old text, and after states that read the new text: KL in
nats is relative to the last. Seconds of a file are those to load it, to edit it, which computes the rotations of keys
with the graph, and to save it. Two texts are rounded differently, which is part of the KL of caches of few bits. All
seconds are processor time of one thread, as other programs may use the machine.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import typer
from rich.console import Console
from rich.table import Table

# Run as a script, Python looks for modules in tools/ only.
sys.path.insert(0, str(Path(__file__).parents[2]))
import graphopt
from graphopt.inference.decoding.decoder import Decoder
from graphopt.inference.decoding.editing import REREAD, Edit, apply_edits
from graphopt.inference.states.state_file import SavedPrompt, StateFile
from graphopt.passes.recipe import Recipe
from tools.bench.parts.continuation import Logs, logs_behind
from tools.bench.parts.machine import describe
from tools.bench.parts.options import JsonFile, token_count
from tools.studies.cache_quality import python_documentation
from tools.studies.real.models import fetch


def read_text(session: graphopt.Session, tokens: list[int], room: int) -> tuple[Decoder, float]:
    """Return a decoder that has read tokens, and the seconds that it took."""
    decoder, begin = Decoder(session, 1, room=len(tokens) + room), time.process_time()
    for _ in decoder.feed(np.array([tokens], np.int64)):
        pass
    return decoder, time.process_time() - begin


def edit_file(model: Path, file: Path, span: list[Edit], reread: int) -> float:
    """Return the seconds to load a file, to edit it and to save it, in a session that has edited nothing before."""
    session = graphopt.load(model, threads=1)
    begin = time.process_time()
    content = StateFile.load(file)
    assert content.prompt is not None
    decoder = Decoder.restore(session, file)
    tokens = decoder.edit(content.prompt.tokens, span, reread=reread)
    new_prompt = SavedPrompt(session.decode(tokens), tokens)
    decoder.save(file.with_suffix(".edited"), new_prompt, original=(content, span[0].start))
    return time.process_time() - begin


def compare(reference: Logs, result: Logs) -> dict[str, float]:
    """Return the KL of log probabilities from the reference, and the share of positions with the same best token."""
    kl = (np.exp(reference) * (reference - result)).sum(axis=1)
    same_share = (reference.argmax(axis=1) == result.argmax(axis=1)).mean()
    return {"kl": float(kl.mean()), "kl_99": float(np.quantile(kl, 0.99)), "same": float(same_share)}


def recipe_of(name: str) -> str | Recipe:
    """Return a preset or file, or for the name of a storage ``rotate-kv4-rtn`` with that storage."""
    if name not in ("float32", "float16", "int8", "int6"):
        return name
    steps = [{"step": "canonicalize"}, {"step": "fold_norms"}, {"step": "rotate", "query_key": "hadamard"}]
    return Recipe.model_validate({"name": name, "steps": [*steps, {"step": "quantize_kv", "storage": name}]})


def main(
    model: Annotated[Path | None, typer.Argument(help="an artifact; SmolLM2 is made by default")] = None,
    recipe: Annotated[str, typer.Option(help="of SmolLM2: a preset, a file, or a storage of rotated heads")] = "int8",
    tokens: Annotated[str, typer.Option(help="of the text")] = "7936",
    following: Annotated[int, typer.Option("--next", min=1, help="tokens after it that are compared")] = 256,
    edits: Annotated[list[str] | None, typer.Option("--edit", help="tokens that are replaced, and by how many")] = None,
    tail_tokens: Annotated[int, typer.Option("--behind", help="tokens after the span; 0: half of the text")] = 0,
    rereads: Annotated[str, typer.Option("--reread", help="tokens after the span that are read again")] = str(REREAD),
    json_file: JsonFile = None,
) -> None:
    """Read the text, edit it, and read the new text; print a row for each edit."""
    count = token_count(tokens)
    head = (
        "edit",
        "read again",
        "seconds",
        "of reading",
        "of a file",
        "of reading",
        "KL, mean",
        "KL, 99%",
        "same token",
    )
    table, rows = Table(*head), []
    with tempfile.TemporaryDirectory() as temporary:
        if model is None:
            model = Path(temporary) / "model"
            graphopt.export(fetch("smollm2"), Path(temporary) / "float32")
            graphopt.optimize(Path(temporary) / "float32", recipe_of(recipe), model, run=False)
        session, file = graphopt.load(model, threads=1), Path(temporary) / "text.cache"
        ids = session.encode(python_documentation())
        text, other_ids = ids[:count], ids[count + following :]
        following_ids: npt.NDArray[np.int64] = np.array(ids[count : count + following], np.int64)
        decoder, reading = read_text(session, text, following)
        prompt = SavedPrompt(session.decode(text), text)
        decoder.save(file, prompt)
        old_logs = logs_behind(decoder.fork([0]), following_ids)
        begin = time.process_time()
        session.key_shifts  # noqa: B018, once for a session
        opening = time.process_time() - begin
        for edit in edits or ["32:32", "64:16", "64:0"]:
            before, after = map(int, edit.split(":"))
            start = count - tail_tokens - before if tail_tokens else count // 2
            span = [Edit(start, start + before, other_ids[:after])]
            new_decoder, _ = read_text(session, apply_edits(text, span), following)
            reference = logs_behind(new_decoder, following_ids)
            del new_decoder
            variants: list[tuple[str, float, float, Logs]] = [("not edited", 0.0, 0.0, old_logs)]
            for reread in map(int, rereads.split(",")):
                fork, begin = decoder.fork([0]), time.process_time()
                fork.edit(text, span, reread=reread)
                seconds = time.process_time() - begin
                file_seconds = edit_file(model, file, span, reread)
                variants.append((str(reread), seconds, file_seconds, logs_behind(fork, following_ids)))
            for name, seconds, file_seconds, result in variants:
                row = {"edit": edit, "reread": name, "seconds": seconds, "share": seconds / reading}
                row |= {"file_seconds": file_seconds, "file_share": file_seconds / reading}
                row |= compare(reference, result)
                rows.append(row)
                figures = (f"{row['kl']:.5f}", f"{row['kl_99']:.4f}", f"{row['same']:.3f}")
                times = (
                    part for value in (seconds, file_seconds) for part in (f"{value:.1f}", f"{value / reading:.3f}")
                )
                table.add_row(edit, name, *times, *figures)
    console = Console(width=120)
    console.print(f"{describe()}; {recipe}, {count} tokens, read in {reading:.1f} s of a processor")
    console.print(f"to find how keys turn, once for a session: {opening:.1f} s")
    console.print(table)
    if json_file is not None:
        content = {"machine": describe(), "recipe": recipe, "tokens": count, "reading": reading, "rows": rows}
        json_file.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
