"""What workers know of each other's requests: in a folder that those of one machine share, or in etcd.

A front moves the requests of a worker that died to another one: prompt and tokens so far, as one list. The journal says
where the prompt ends, so that random numbers and grammars go on where they were; and which requests were being read
when a worker crashed, so that the one that crashed it does not crash the next. Of another machine nobody knows how a
worker ended: there a request may take two workers with it before it is refused.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import secrets
import sys
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pathlib import Path


_READERS = 2  # workers of other machines that may be lost while they read a request


class Store(Protocol):
    """Where entries are: texts by their keys, all of whose methods may raise an OSError."""

    def load(self, key: str) -> str | None:
        """Return what was saved."""

    def save(self, key: str, text: str) -> None:
        """Save it."""

    def remove(self, key: str) -> None:
        """Forget it."""


class FolderStore:
    """Texts as files of a folder.

    Args:
        folder: what the workers share.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, key: str) -> str | None:
        """Return what was saved."""
        file = self._folder / key
        return file.read_text() if file.is_file() else None

    def save(self, key: str, text: str) -> None:
        """Save it; renamed, so that a worker that dies leaves the old text or the new one."""
        new = self._folder / f"{key}.new"
        new.write_text(text)
        new.replace(self._folder / key)

    def remove(self, key: str) -> None:
        """Forget it."""
        (self._folder / key).unlink(missing_ok=True)


@dataclass(frozen=True)
class Entry:
    """A request that a worker has.

    Attributes:
        prompt: tokens of its prompt.
        seed: of its random numbers.
        worker: the name of the journal that has it.
        has_token: whether that worker made a token of it.
        readers: workers that had it one after the other, and made no token of it.
    """

    prompt: int
    seed: int
    worker: str
    has_token: bool = False
    readers: int = 1


class Journal:
    """The entries of one worker, among those of others.

    Args:
        folder: what the workers of this machine share.
        store: where the entries are; the folder by default.
    """

    def __init__(self, folder: Path, store: Store | None = None) -> None:
        self._folder, self._store = folder, store or FolderStore(folder)
        self.name = secrets.token_hex(8)
        self._fresh: dict[str, Entry] = {}
        self._crash = self._crash_of(self.name).open("w")

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
        readers = 1
        if before is not None and not before.has_token and before.worker != self.name:
            crash = self._crash_of(before.worker)
            if crash.is_file() and crash.stat().st_size:
                raise ValueError("a worker crashed while it read this request, so no other one gets it")
            readers = before.readers + (not crash.is_file())
            if readers > _READERS:
                raise ValueError(f"{_READERS} workers were lost while they read this request, so no other one gets it")
        prompt, seed = (tokens, seed) if before is None else (before.prompt, before.seed)
        entry = Entry(prompt, seed, self.name, readers=readers)
        self._fresh[name] = entry
        self._write(name, entry)
        return entry

    def note_token(self, name: str) -> None:
        """Write down that a token was made: what is sent to another worker from now on is another list of tokens."""
        entry = self._fresh.pop(name, None)
        if entry is not None:
            self._write(name, replace(entry, has_token=True))

    def end(self, name: str) -> None:
        """Forget a request that has ended, unless another worker has it by now."""
        self._fresh.pop(name, None)
        entry = self._load(name)
        if entry is not None and entry.worker == self.name:
            try:
                self._store.remove(_key(name))
            except OSError as error:
                _tell(error)

    def note_crash(self, reason: str) -> None:
        """Write down that this process ends because of what it computed."""
        self._crash.write(reason)
        self._crash.flush()

    def _load(self, name: str) -> Entry | None:
        try:
            return Entry(**json.loads(self._store.load(_key(name)) or "null"))
        except OSError as error:
            _tell(error)
        except (ValueError, TypeError):
            pass
        return None

    def _write(self, name: str, entry: Entry) -> None:
        try:
            self._store.save(_key(name), json.dumps(asdict(entry)))
        except OSError as error:
            _tell(error)

    def _crash_of(self, name: str) -> Path:
        return self._folder / f"crash-{name}"


def _key(name: str) -> str:
    # Clients may choose the name.
    return f"request-{hashlib.sha256(name.encode()).hexdigest()[:32]}"


def _tell(error: OSError) -> None:
    """Say that a request goes on without its entry: should it move, it may draw other tokens there."""
    sys.stderr.write(f"the journal of requests cannot be reached: {error}\n")
    sys.stderr.flush()
