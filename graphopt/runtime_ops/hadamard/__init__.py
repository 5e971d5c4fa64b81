"""Hadamard transforms of the last axis of a tensor while a model runs."""
