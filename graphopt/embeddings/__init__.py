"""Encoders at work: texts become embeddings, and two models are compared by them."""

from __future__ import annotations

from graphopt.embeddings.session import EncoderSession, load_encoder

__all__ = ["EncoderSession", "load_encoder"]
