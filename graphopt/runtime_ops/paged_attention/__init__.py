"""``ai.graphopt::PagedAttention``: attention of many requests over pages that they share."""
