"""Which axes of tensors share a basis, and which bases can be rotated."""
