"""What the operator means: types, shapes, body, reference, bounds."""
