"""Layers, roles, products, caches and cost of a graph."""
