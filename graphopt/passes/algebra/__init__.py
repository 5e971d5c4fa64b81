"""Phase ``algebra``: exact rewrites of weights: folded norms, rotations."""
