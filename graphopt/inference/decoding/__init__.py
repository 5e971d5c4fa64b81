"""Parts of generation: a cache that lives across steps, the choice of a token, text from tokens."""
