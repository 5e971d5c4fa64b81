"""``CausalConv``: a causal convolution of each channel by itself, with the tail of the tokens as its state."""
