"""Attention that owns its cache, in pages: what is read of the graph, and the nodes that take its place."""
