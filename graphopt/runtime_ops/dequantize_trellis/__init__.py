"""``DequantizeTrellis``: the matrix that codes of a trellis stand for; the logical form, before ``lower``."""
