"""Phase ``lift``: what exporters spell out becomes the standard ops for it."""
