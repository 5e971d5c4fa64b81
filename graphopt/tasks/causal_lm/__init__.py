"""Causal language models: tokens in, logits of the next token out, with caches of keys and values or without."""

from graphopt.tasks.causal_lm.task import CAUSAL_LM, CausalLM

__all__ = ["CAUSAL_LM", "CausalLM"]
