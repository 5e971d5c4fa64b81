"""Running a model: sessions, decoding, drafts, conversations, embeddings, profiling."""
