"""``Dequantize``: the matrix that stored codes stand for; the logical form of a quantized weight, before ``lower``."""
