"""``UnpackTrellis``: the matrix that packed codes of a trellis stand for, which a product with floats reads."""
