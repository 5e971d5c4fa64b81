"""Encoder-decoders: a source in, a text out. One artifact of two graphs, each with a task of its own."""

from graphopt.tasks.seq2seq.decoder import SEQ2SEQ as SEQ2SEQ
from graphopt.tasks.seq2seq.encoder import SEQ2SEQ_ENCODER as SEQ2SEQ_ENCODER
