"""Phase ``cache``: attention over caches in pages: stored as codes, read in part."""
