"""The search of scales that looks further than that of ``nearest``: more shares, and the best scale of given codes."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from graphopt.formats.table import TableFormat
from graphopt.rounding import scales
from graphopt.rounding.scales import Chosen, Doubles, Scale, attempt, better, decoded, encoded, squared_error, stored


class Search(BaseModel):
    """Which scales are tried.

    Attributes:
        least: the smallest share of the extreme.
        steps: how many shares, from 1 down to it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    least: Annotated[float, Field(gt=0, lt=1)] = 0.4
    steps: Annotated[int, Field(ge=2, le=100)] = 16

    def choose(
        self, groups: Doubles, table: TableFormat, scale: Scale, kind: np.dtype[Any], importance: Doubles | None
    ) -> Chosen:
        """Choose scales, and the codes nearest at them; arguments as for :func:`graphopt.rounding.scales.choose`."""
        best = scales.choose(groups, table, scale, kind, importance)
        if scale == "extreme":
            return best
        error = squared_error(groups, table, best, importance)
        shares = [float(share) for share in np.linspace(1.0, self.least, self.steps)]
        for trial in (best, *(attempt(groups, table, share, kind) for share in shares)):
            best, error = better(best, error, trial, squared_error(groups, table, trial, importance))
            refined = fitted(groups, table, trial, kind, importance)
            best, error = better(best, error, refined, squared_error(groups, table, refined, importance))
        return best


def fitted(
    groups: Doubles, table: TableFormat, chosen: Chosen, kind: np.dtype[Any], importance: Doubles | None
) -> Chosen:
    """Return the scale of least squared error for the codes of ``chosen``, and the codes nearest at that scale."""
    values = decoded(chosen.codes, table, np.ones(1), chosen.zero_points[:, None])
    weighted = values if importance is None else importance * values
    above, below = (weighted * groups).sum(1), (weighted * values).sum(1)
    best = stored(np.divide(above, below, out=chosen.scales.copy(), where=below > 0), 1.0, kind)
    codes = encoded(groups, table, best[:, None], chosen.zero_points[:, None])
    return Chosen(codes, best, chosen.zero_points)
