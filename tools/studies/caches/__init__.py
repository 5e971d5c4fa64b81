"""Caches of papers and of other programs, emulated on keys and values of a model."""
