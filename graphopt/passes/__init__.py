"""The passes: one file, one rewrite."""
