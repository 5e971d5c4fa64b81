"""Encoders without padding: nodes that treat tokens one by one see tokens of texts alone."""

from __future__ import annotations

from graphopt.passes.interface.pack_tokens.pack_tokens import PackTokens

__all__ = ["PackTokens"]
