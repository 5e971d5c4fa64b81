"""Requests that share a graph and a pool of blocks, as an engine drives them."""

from graphopt.passes.interface.serve.serve import Serve as Serve
