"""``MatMulCodebook``: a product with a weight whose codes each stand for several neighbouring numbers."""
