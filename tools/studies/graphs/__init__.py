"""Papers on encoders, images and graphs that skip tokens: parts of `tools/studies/graph_methods.py`."""
