"""Where a model runs: names that command lines, recipes and sessions share."""

from __future__ import annotations

from typing import Literal

Device = Literal["cpu", "cuda"]
"""What a session computes on; ``cuda`` is an NVIDIA GPU."""

Target = Literal["portable", "ort-cpu", "ort-cuda"]
"""What a model is made for; see the step ``lower``."""
