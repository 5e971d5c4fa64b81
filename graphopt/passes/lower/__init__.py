"""Phase ``lower``: layouts, kernels and types of the target; always there, always last."""
