"""Rounding, statistics of inputs, and the codes of files that others wrote."""
