"""Models that come in: export from transformers, and the small trained model that ships with the package."""
