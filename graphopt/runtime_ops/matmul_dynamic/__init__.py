"""Products of table-coded weights with activations that are rotated and rounded, token by token."""
