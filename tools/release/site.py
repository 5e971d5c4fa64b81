"""Hooks of mkdocs: the README becomes the front page, and links to sources become names.

Pages are written for readers of the repository, with links to files outside of ``docs/``. Links to files that are pages
of the site lead to these pages; others, such as examples in C++, are shown as their path.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}
"""Files of the repository's root that are pages, by the names that they have on the site."""

LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from outside of ``docs/``."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Turn links that are right in the repository into links that are right on the site."""
    del config
    home = {site: source for source, site in PAGES.items()}
    uri: str = page.file.src_uri
    folder = PurePosixPath(home[uri]).parent if uri in home else PurePosixPath("docs", uri).parent

    def rewrite(match: re.Match[str]) -> str:
        image, text, target, anchor = match[1], match[2], match[3], match[4] or ""
        if target.startswith(("https://", "http://", "mailto:")):
            return match[0]
        path = _resolve(folder / target)
        uri_there = PAGES.get(path) or path.removeprefix("docs/")
        if (path not in PAGES and not path.startswith("docs/")) or files.get_file_from_path(uri_there) is None:
            return f"{text} (`{path}`)"
        depth = "../" * (len(PurePosixPath(uri).parts) - 1)
        return f"{image}[{text}]({depth}{uri_there}{anchor})"

    return LINK.sub(rewrite, markdown)


def _resolve(path: PurePosixPath) -> str:
    parts: list[str] = []
    for part in path.parts:
        if part == "..":
            parts.pop()
        elif part != ".":
            parts.append(part)
    return "/".join(parts)
