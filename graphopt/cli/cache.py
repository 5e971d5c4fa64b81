"""The commands ``cache make``, ``cache edit`` and ``cache show``: prompts that are read once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from graphopt.cli.commands import command
from graphopt.cli.console import Json, OnDevice, Threads, out, print_json, progress, read_text, show_notes
from graphopt.errors import InputError


@command("cache make")
def make(
    folder: Annotated[Path, typer.Argument(help="an artifact of a language model")],
    output: Annotated[Path, typer.Option("-o", "--output", help="file to write")],
    prompt: Annotated[str | None, typer.Option("--prompt", help="a text that prompts begin with")] = None,
    prompt_file: Annotated[Path | None, typer.Option("--prompt-file", help="the same, in a file")] = None,
    system: Annotated[str | None, typer.Option("--system", help="what the model is told before chats")] = None,
    system_file: Annotated[Path | None, typer.Option("--system-file", help="the same, in a file")] = None,
    loss: Annotated[
        Literal["none", "scales", "values"], typer.Option("--loss", help="what the file may lose of states")
    ] = "none",
    threads: Threads = 0,
    device: OnDevice = "cpu",
    as_json: Json = False,
) -> None:
    """Let a model read a beginning that many prompts share, and keep its states in a file.

    `graphopt run --cache FILE` goes on from there: what --prompt says comes behind the text of the file, and a chat
    begins with its system prompt. A file is of one model; another refuses it. The file is compressed: int4 pages take
    0.86 of their bytes in it, 0.77 with `--loss scales`, which rounds what belongs to codes, and 0.63 with `--loss
    values`, which also takes codes of values to every third level.
    """
    from graphopt.inference.prompt_cache import PromptCache
    from graphopt.inference.session import load

    texts = [prompt, prompt_file and read_text(prompt_file), system, system_file and read_text(system_file)]
    if sum(text is not None for text in texts) != 1:
        raise InputError("a cache is of one text", remedy="give --prompt, --prompt-file, --system or --system-file")
    session = load(folder, threads=threads, device=device)
    show_notes(session.notes)
    with progress() as say:
        say("reading the prompt")
        if texts[0] is not None or texts[1] is not None:
            cache = PromptCache.read_text(session, texts[0] or texts[1] or "")
        else:
            cache = PromptCache.read_system(session, texts[2] or texts[3] or "")
        cache.save(output, loss)
    _print(output, as_json)


@command("cache edit")
def edit(
    folder: Annotated[Path, typer.Argument(help="the artifact that the file is of")],
    file: Annotated[Path, typer.Argument(help="a file that `graphopt cache make` wrote")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="file to write; by default the same one")
    ] = None,
    text: Annotated[str | None, typer.Option("--text", help="what the text of the file is from now on")] = None,
    text_file: Annotated[Path | None, typer.Option("--text-file", help="the same, in a file")] = None,
    old: Annotated[str | None, typer.Option("--replace", help="a part of the text, which stands there once")] = None,
    new: Annotated[str, typer.Option("--by", help="what comes in its place; by default nothing")] = "",
    reread: Annotated[int, typer.Option("--reread", min=0, help="tokens behind each change that are read again")] = 32,
    loss: Annotated[
        Literal["none", "scales", "values"] | None,
        typer.Option("--loss", help="what the file may lose of states; by default as much as it did"),
    ] = None,
    threads: Threads = 0,
    device: OnDevice = "cpu",
    as_json: Json = False,
) -> None:
    """Change the text of such a file, and read only what changed.

    Tokens that are new are read. Those behind them move: their keys turn to their new positions, but they still know
    what stood there before, so answers are near to those behind the text read anew, not the same. `graphopt cache edit
    int4 manual.cache --text-file manual.txt` follows a file that was edited; a text may change at several places.
    """
    from graphopt.inference.prompt_cache import PromptCache
    from graphopt.inference.session import load
    from graphopt.inference.states.state_file import StateFile

    if sum(part is not None for part in (text, text_file, old)) != 1:
        raise InputError("an edit is a new text or a part of it", remedy="give --text, --text-file or --replace")
    session = load(folder, threads=threads, device=device)
    show_notes(session.notes)
    with progress() as say:
        say("loading the cache")
        cache = PromptCache.load(session, file)
        prompt = cache.prompt
        before = prompt.text if prompt.system is None else prompt.system
        if old is not None and before.count(old) != 1:
            raise InputError(
                f"the text has {old!r} {before.count(old)} times",
                file=file,
                remedy="give a part that stands there once",
            )
        after = before.replace(old, new) if old is not None else read_text(text_file) if text_file else text or ""
        say("reading what changed")
        edits = cache.edit(after, reread=reread)
        cache.save(output or file, loss or StateFile.load(file).loss)
    _print(output or file, as_json)
    if not as_json:
        parts = (f"tokens {edit.start} to {edit.end} by {len(edit.tokens)}" for edit in edits[:10])
        out.print(f"replaced: {', '.join(parts) or 'nothing'}", markup=False, highlight=False, soft_wrap=True)


@command("cache show")
def show(
    file: Annotated[Path, typer.Argument(help="a file that `graphopt cache make` wrote")], as_json: Json = False
) -> None:
    """Print what a file of `graphopt cache make` holds: its text, tokens, bytes, and which model it is of."""
    _print(file, as_json)


def _print(file: Path, as_json: bool) -> None:
    from graphopt.inference.states.state_file import StateFile

    content = StateFile.load(file)
    prompt, size, tokens = content.prompt, file.stat().st_size, int(content.tokens.max())
    report = {
        "file": str(file),
        "model": content.model,
        "tokens": tokens,
        "rows": len(content.tokens),
        "bytes": size,
        "loss": content.loss,
        "kind": None if prompt is None else "text" if prompt.system is None else "system prompt",
        "text": None if prompt is None else prompt.text,
    }
    if as_json:
        return print_json(report)
    text = "no text: it was not made by `graphopt cache make`" if prompt is None else repr(prompt.text[:60])
    out.print(
        f"{file}: {tokens} tokens in {size / 1e6:.1f} MB, {size / tokens / 1e3:.1f} kB a token, "
        f"of the model {content.model[:12]}; {report['kind'] or 'states'}: {text}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    return None
