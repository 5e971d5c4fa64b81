"""What the operator means: schema, body, reference."""
