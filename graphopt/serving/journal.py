"""What workers of one machine know of each other's requests, in a folder that they share.

A front moves the requests of a worker that died to another one: prompt and tokens so far, as one list. The journal says
where the prompt ends, so that random numbers and grammars go on where they were; and which requests were being read
when a worker crashed, so that the one that crashed it does not crash the next.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class Entry:
    """A request that a worker has.

    Attributes:
        prompt: tokens of its prompt.
        seed: of its random numbers.
        worker: the process that has it.
        has_token: whether that process made a token of it.
    """

    prompt: int
    seed: int
    worker: int
    has_token: bool = False


class Journal:
    """The entries of one worker, among those of others.

    Args:
        folder: what the workers share.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._process = folder, os.getpid()
        self._fresh: dict[str, Entry] = {}
        self._crash = self._crash_of(self._process).open("w")

    def watch(self) -> None:
        """Let signals that end this process (SIGSEGV, SIGABRT) leave their traceback here; SIGKILL leaves nothing."""
        faulthandler.enable(self._crash)

    def take(self, name: str, tokens: int, seed: int) -> Entry:
        """Write down that this worker has a request, and return what is known of it.

        Args:
            name: the front's name of the request, the same on each worker.
            tokens: tokens that the front sent.
            seed: of its random numbers, unless it has one.

        Raises:
            ValueError: another worker crashed before it made a token of what was sent.
        """
        before = self._load(name)
        if before is not None and not before.has_token and self._has_crashed(before.worker):
            raise ValueError("a worker crashed while it read this request, so no other one gets it")
        entry = Entry(*((tokens, seed) if before is None else (before.prompt, before.seed)), self._process)
        self._fresh[name] = entry
        self._write(name, entry)
        return entry

    def note_token(self, name: str) -> None:
        """Write down that a token was made: what is sent to another worker from now on is another list of tokens."""
        entry = self._fresh.pop(name, None)
        if entry is not None:
            self._write(name, Entry(**{**asdict(entry), "has_token": True}))

    def end(self, name: str) -> None:
        """Forget a request that has ended, unless another worker has it by now."""
        self._fresh.pop(name, None)
        entry = self._load(name)
        if entry is not None and entry.worker == self._process:
            self._file(name).unlink(missing_ok=True)

    def note_crash(self, reason: str) -> None:
        """Write down that this process ends because of what it computed."""
        self._crash.write(reason)
        self._crash.flush()

    def _load(self, name: str) -> Entry | None:
        try:
            return Entry(**json.loads(self._file(name).read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def _write(self, name: str, entry: Entry) -> None:
        # Renamed, so that a worker that dies leaves the old entry or the new one.
        file = self._file(name)
        new = file.with_suffix(".new")
        new.write_text(json.dumps(asdict(entry)))
        new.replace(file)

    def _file(self, name: str) -> Path:
        # Clients may choose the name.
        return self._folder / f"request-{hashlib.sha256(name.encode()).hexdigest()[:32]}"

    def _has_crashed(self, process: int) -> bool:
        file = self._crash_of(process)
        return process != self._process and file.is_file() and file.stat().st_size > 0

    def _crash_of(self, process: int) -> Path:
        return self._folder / f"crash-{process}"
