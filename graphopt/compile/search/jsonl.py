"""Rows in a file, one a line: what was measured before a search was cut off is not measured again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from pydantic import BaseModel

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

RowT = TypeVar("RowT", bound=BaseModel)


class Lines(Generic[RowT]):
    """Rows in a file.

    Args:
        file: it is made when the first row is added; a line that was cut off is left out.
        kind: of the rows.
        key: what :attr:`rows` calls a row.
    """

    def __init__(self, file: Path, kind: type[RowT], key: Callable[[RowT], str]) -> None:
        self.file, self.rows, self._key = file, dict[str, RowT](), key
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        for line in text[: text.rfind("\n") + 1].splitlines():
            row = kind.model_validate_json(line)
            self.rows[key(row)] = row
        if text and not text.endswith("\n"):
            file.write_text(text[: text.rfind("\n") + 1], encoding="utf-8")

    def add(self, row: RowT) -> None:
        """Add a row."""
        self.rows[self._key(row)] = row
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a", encoding="utf-8") as stream:
            stream.write(row.model_dump_json() + "\n")
