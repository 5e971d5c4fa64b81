"""What a graph means: its interface, its bases, its cost."""
