"""Model files, editing, provenance, weights as expressions, diagnostics."""
