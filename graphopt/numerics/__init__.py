"""Formats and rotations in pure NumPy."""
