"""GPTQ, which is LDLQ: the error of each row is made up for by the rows after it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from graphopt.quantization.rounding.descent import polish
from graphopt.quantization.rounding.factors import factor_of
from graphopt.quantization.rounding.feedback import Rule, round_with_feedback
from graphopt.quantization.rounding.ldl import wiener_filter
from graphopt.quantization.rounding.method import Need, RoundingMethod
from graphopt.quantization.rounding.scale_search import Search
from graphopt.quantization.rounding.single_thread import one_thread

if TYPE_CHECKING:
    from graphopt.numerics.formats.format import Format
    from graphopt.quantization.rounding.nearest import QuantizedMatrix
    from graphopt.quantization.rounding.scales import Scale


class GPTQ(RoundingMethod):
    """Round row after row and let later rows make up for the error that earlier ones made in the product.

    What matters is not W - Q but X (W - Q), whose squared norm is the trace of E^T H E for E = W - Q and H = X^T X.
    With H = (U + I) D (U + I)^T, U strictly upper triangular, that is the sum over rows k of

        D_k |E_k + sum over j < k of U_jk E_j|^2

    so row k is rounded to the code nearest to W_k + sum of U_jk E_j: LDLQ (QuIP, Chee et al. 2023, section 3), which
    is the same as GPTQ (Frantar et al. 2023; the equivalence is theorem 6 of QuIP). A block of rows is corrected by one
    product, as in GPTQ's lazy updates; only the factor of H is needed, not its inverse.

    Where inputs are rounded at run time, to X + N, the product makes (X + N) Q for X W. With errors N that are not
    correlated, all of mean square v, the squared norm of the difference is on average, per token and up to a constant,

        trace (Q - W')^T (H + v) (Q - W')        W' = (H + v)^-1 H W

    so W' is rounded instead of W, with more on the diagonal of H. W' is smaller than W where inputs hardly vary, where
    their rounding is all that the product would see (a Wiener filter). Behind a rotation errors are uncorrelated and of
    one size.

    Attributes:
        damping: what is added to the diagonal of H, as a share of its mean.
        input_noise: v, as a share of the mean square of the inputs: 0.014 for int4 per token of normal numbers. It
            makes one product better, and made a whole model worse: docs/rounding.md, "Inputs in 4 bits".
        order: "activation": rows with the largest inputs first, so that all others make up for their errors; codes lie
            where they did, so it costs nothing at run time. Or "natural". Which is better: docs/rounding.md.
        scales: when the scale of a group is chosen: "static", for the weights as they were, or, in the natural order
            only, "reached": for its rows as corrected so far.
        importance: what the error of a row counts when its scale is chosen: "uniform", all the same; "inputs", the
            mean square of its input, H_kk; or "feedback", D_k, what is left of it when all later rows make up for it.
        search: which scales are tried.
        sweeps: how often codes and scales are polished afterwards, one by one while all others stay, see
            :mod:`graphopt.quantization.rounding.descent`. A sweep takes about twice as long as the products of GPTQ
            itself.
    """

    method: Literal["gptq"] = "gptq"
    damping: Annotated[float, Field(gt=0, le=1)] = 0.01
    input_noise: Annotated[float, Field(ge=0, le=1)] = 0.0
    order: Literal["natural", "activation"] = "activation"
    scales: Literal["reached", "static"] = "static"
    importance: Literal["uniform", "inputs", "feedback"] = "feedback"
    search: Search = Search()
    sweeps: Annotated[int, Field(ge=0, le=100)] = 0

    @model_validator(mode="after")
    def _static_in_other_orders(self) -> GPTQ:
        if self.order != "natural" and self.scales != "static":
            raise ValueError("in the order of activations the rows of a group are far apart: scales must be static")
        return self

    @property
    def needs(self) -> Need:
        """X^T X."""
        return "hessian"

    def round(
        self,
        matrix: npt.NDArray[np.float32],
        format: Format,
        group: int,
        scale: Scale,
        *,
        scale_type: npt.DTypeLike,
        statistics: npt.NDArray[Any] | None,
    ) -> QuantizedMatrix:
        """See :class:`RoundingMethod`."""
        assert statistics is not None
        diagonal = np.diagonal(statistics)
        natural = self.order == "natural"
        order = np.arange(len(matrix)) if natural else np.argsort(-diagonal, kind="stable")
        with one_thread():
            damping = self.damping + self.input_noise
            factor = factor_of(statistics, damping, order)
            if self.input_noise:
                matrix = wiener_filter(matrix, statistics, self.input_noise)
            importance = None
            if self.importance == "feedback":
                importance = np.empty_like(factor.weights)
                importance[order] = factor.weights
            elif self.importance == "inputs" and diagonal.any():
                importance = diagonal + damping * diagonal.mean()
            static = self.scales == "static"
            rule = Rule(format, group, scale, np.dtype(scale_type), importance, self.search, static)
            matrix_codes = round_with_feedback(matrix, factor, order, rule)
            return polish(matrix_codes, matrix, statistics, damping, self.sweeps) if self.sweeps else matrix_codes
