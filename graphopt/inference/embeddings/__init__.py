"""Encoders at work: texts become embeddings, and two models are compared by them."""

from __future__ import annotations

from graphopt.inference.embeddings.evaluate import EmbeddingEvaluation, evaluate_embeddings
from graphopt.inference.embeddings.session import EncoderSession, encoder_of, load_encoder

__all__ = ["EmbeddingEvaluation", "EncoderSession", "encoder_of", "evaluate_embeddings", "load_encoder"]
