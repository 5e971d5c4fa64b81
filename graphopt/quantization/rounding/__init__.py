"""Rounding: how codes are chosen, given a weight and a format. Formats and roundings multiply."""

from graphopt.quantization.rounding.method import RoundingMethod
from graphopt.quantization.rounding.nearest import QuantizedMatrix, round_to_nearest

__all__ = ["QuantizedMatrix", "RoundingMethod", "round_to_nearest"]
