"""Inputs from files: one or many samples, by name or alone; what does not fit is named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from graphopt.errors import InputError
from graphopt.tasks.graph.files import read_samples
from graphopt.tasks.ports import Port

PORTS = [
    Port("x", np.dtype(np.float32), (None, 4)),
    Port("kind", np.dtype(np.int64), ()),
]
ROWS = np.arange(24, dtype=np.float64).reshape(3, 2, 4)


def test_rows_of_an_archive_are_samples(tmp_path: Path) -> None:
    np.savez(tmp_path / "one.npz", x=ROWS[0], kind=2, other=1)
    (sample,) = read_samples(tmp_path / "one.npz", PORTS)
    assert (sample["x"].dtype, sample["x"].tolist(), sample["kind"].item()) == (np.float32, ROWS[0].tolist(), 2)
    np.savez(tmp_path / "many.npz", x=ROWS, kind=[5, 6, 7])
    samples = read_samples(tmp_path / "many.npz", PORTS)
    assert [sample["kind"].item() for sample in samples] == [5, 6, 7]
    assert np.array_equal(samples[2]["x"], ROWS[2])
    # One array for all samples, and a graph whose batch is 1.
    np.savez(tmp_path / "shared.npz", x=ROWS.reshape(6, 4), kind=1)
    fixed_ports = [Port("x", np.dtype(np.float32), (1, 4)), PORTS[1]]
    assert [sample["kind"].item() for sample in read_samples(tmp_path / "shared.npz", fixed_ports)] == [1] * 6


def test_folders_hold_archives_or_arrays(tmp_path: Path) -> None:
    for name in ("archives", "named", "alone"):
        (tmp_path / name).mkdir()
    for number in range(2):
        np.savez(tmp_path / "archives" / f"{number}.npz", x=ROWS[number], kind=number)
        np.save(tmp_path / "alone" / f"{number}.npy", ROWS[number])
    assert [sample["kind"].item() for sample in read_samples(tmp_path / "archives", PORTS)] == [0, 1]
    np.save(tmp_path / "named" / "x.npy", ROWS)
    np.save(tmp_path / "named" / "kind.npy", np.array([1, 2, 3]))
    assert len(read_samples(tmp_path / "named", PORTS)) == 3
    assert len(read_samples(tmp_path / "alone", PORTS[:1])) == 2


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": ROWS[0]}, "lack one of the graph; there is x.*tensor=kind"),
        ({"x": ROWS[0, :, :3], "kind": 1}, r"takes the shape \[\?, 4\].*tensor=x, shape=\[2, 3\]"),
        ({"x": ROWS[0], "kind": 1.5}, "float64 do not fit into the input's int64.*tensor=kind"),
        ({"x": ROWS, "kind": [1, 2]}, "holds 2 samples, and another input 3.*tensor=kind"),
        ({"x": np.array([[{}]]), "kind": 1}, "the inputs cannot be read"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, arrays: dict[str, object], message: str) -> None:
    file = tmp_path / "inputs.npz"
    np.savez(file, **arrays)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=message):
        read_samples(file, PORTS)


def test_missing_and_damaged_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there are no inputs here"):
        read_samples(tmp_path / "none.npz", PORTS)
    with pytest.raises(InputError, match=r"holds no \.npz and no \.npy file"):
        read_samples(tmp_path, PORTS)
    np.save(tmp_path / "x.npy", ROWS)
    with pytest.raises(InputError, match=r"no \.npy file for an input.*tensor=kind"):
        read_samples(tmp_path, PORTS)
    with pytest.raises(InputError, match="one array without a name"):
        read_samples(tmp_path / "x.npy", PORTS)
    (tmp_path / "cut.npz").write_bytes(b"PK\x03\x04")
    with pytest.raises(InputError, match="cannot be read"):
        read_samples(tmp_path / "cut.npz", PORTS)
