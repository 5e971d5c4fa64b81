"""``DequantizeCodebook``: the matrix that codes of vectors stand for; the logical form, before ``lower``."""
