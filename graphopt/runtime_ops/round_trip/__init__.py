"""Numbers rounded to few bits and turned back at once: an emulation of storing them so."""
