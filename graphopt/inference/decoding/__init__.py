"""Parts of generation: states that live across steps, the choice of a token, text from tokens."""
