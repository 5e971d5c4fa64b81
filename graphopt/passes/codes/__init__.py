"""Phase ``codes``: weights and inputs of products become codes, which stay logical until ``lower``."""
