"""Kinds of clusters, one file each."""
