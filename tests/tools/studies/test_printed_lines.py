"""Lines of printed text as inputs of a network."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tools.studies.printed_lines import HEIGHT, LINES, WIDTH, main


def test_files_have_other_lines_as_the_network_wants_them(tmp_path: Path) -> None:
    files = [tmp_path / "lines.npz", tmp_path / "others.npz"]
    main(files, name="x")
    lines, other_lines = (np.load(file)["x"] for file in files)
    assert (lines.shape, lines.dtype) == ((LINES, 1, 3, HEIGHT, WIDTH), np.float32)
    assert not np.array_equal(lines, other_lines)
    # Dark on light: most of an image is background, and text is much darker.
    assert lines.min() < -0.2
    assert np.median(lines) > 0.3
    assert np.abs(lines).max() <= 1  # the network reads colours from -1 to 1
