"""Attention that owns its cache: pages, which a policy picks, stored as floats or in few bits."""
