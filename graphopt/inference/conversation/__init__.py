"""Conversations with a model: chat templates, and a cache that lives from turn to turn."""
