"""Parts of generation: a cache that is kept between steps, the choice of a token, text from tokens."""
