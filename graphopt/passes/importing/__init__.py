"""Phase ``importing``: what a file says in its exporter's way becomes what all other phases expect.

No pass is here yet: :func:`graphopt.analysis.contrib.settle_caches` still does this while a file is read, unchecked.
"""
