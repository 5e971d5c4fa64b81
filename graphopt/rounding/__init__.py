"""Rounding: how codes are chosen, given a weight and a format. Formats and roundings multiply."""

from graphopt.rounding.nearest import Quantized, round_to_nearest

__all__ = ["Quantized", "round_to_nearest"]
