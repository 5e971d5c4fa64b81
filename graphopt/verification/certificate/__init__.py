"""The certificate: that a rotated graph computes what the graph before it computes, checked without the rewriter."""
