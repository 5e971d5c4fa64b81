"""A full disk is an error like any other: found before writing where that can be, and said with figures."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from typing import TYPE_CHECKING

from graphopt.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# No space, quota, and the limit on the size of a file that a shell or a job scheduler may set.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def require_space(folder: Path, nbytes: int) -> None:
    """Refuse to write ``nbytes`` bytes into a folder whose disk has less free.

    Raises:
        InputError: it has less; says how much.
    """
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise _full(folder, nbytes, free)


@contextlib.contextmanager
def writing(folder: Path, nbytes: int | None = None) -> Iterator[None]:
    """Turn the system's errors about a full disk, a quota or a limit on the size of files into one of ours.

    Args:
        folder: where is written.
        nbytes: how many bytes the block writes, where that is known.

    Raises:
        InputError: the block ran out of space.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise _full(folder, nbytes, shutil.disk_usage(folder).free, error.errno) from error


def reserve(file: Path, size: int) -> None:
    """Make a file of ``size`` bytes whose space is taken at once, where the system can do that.

    Raises:
        InputError: there is no space for it.
    """
    require_space(file.parent, size)
    with writing(file.parent, size), file.open("wb") as stream:
        if size and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(stream.fileno(), 0, size)
        else:
            stream.truncate(size)


def _full(folder: Path, nbytes: int | None, free: int, code: int = errno.ENOSPC) -> InputError:
    problem = "the disk is full" if code == errno.ENOSPC else f"the file cannot be written ({os.strerror(code)})"
    size = "" if nbytes is None else f"{nbytes / 1e6:,.1f} MB are needed, "
    return InputError(
        f"{problem}: {size}{free / 1e6:,.1f} MB are free",
        file=folder,
        remedy="make room, or write to another disk (-o, and --work for intermediate weights)",
    )
