"""``MatMulExperts``: products with the weights of the experts that a router chose."""
