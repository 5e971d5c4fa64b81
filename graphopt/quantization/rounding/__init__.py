"""Rounding: how codes are chosen, given a weight and a format. Formats and roundings multiply."""

from graphopt.quantization.rounding.method import RoundingMethod
from graphopt.quantization.rounding.nearest import Quantized, round_to_nearest

__all__ = ["Quantized", "RoundingMethod", "round_to_nearest"]
