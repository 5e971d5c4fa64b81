"""Encoder-decoders: a source in, a text out. One artifact of two graphs, each with a task of its own."""

from graphopt.tasks.seq2seq.decoder import SEQ2SEQ, Seq2Seq
from graphopt.tasks.seq2seq.encoder import SEQ2SEQ_ENCODER, Seq2SeqEncoder

__all__ = ["SEQ2SEQ", "SEQ2SEQ_ENCODER", "Seq2Seq", "Seq2SeqEncoder"]
