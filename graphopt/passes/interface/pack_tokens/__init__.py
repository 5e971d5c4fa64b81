"""Encoders without padding: nodes that treat tokens one by one see tokens of texts alone."""

from graphopt.passes.interface.pack_tokens.pack_tokens import PackTokens as PackTokens
