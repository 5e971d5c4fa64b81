from __future__ import annotations

import numpy as np
import pytest

from tools.bench import latent

# Sums of 512 numbers in float32 in another order, in products and in the softmax's sums.
TOLERANCE = 1e-4


def test_the_absorbed_form_computes_what_exporters_write() -> None:
    forms = [latent.Form(model, 20, None, 1) for model in (latent.made_from_latents(), latent.absorb_latents())]
    expected, result = (form.outputs()[0] for form in forms)
    assert np.abs(result - expected).max() <= TOLERANCE * np.abs(expected).max()


def test_each_form_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    latent.main(past="40", rounds=1, threads=1)
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 7
    # float32: a latent of 512 and 64 of the rotary part; keys of 192 and values of 128 of 16 heads
    assert [row.split()[-4] for row in rows[:3]] == ["2304", "20480", "2304"]
