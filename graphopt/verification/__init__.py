"""What is proved, measured and refused: certificate, equivalence, kernels that really run, replay."""
