"""Checkpoints that quantizers wrote, read at their own codes. What reads the layout of a quantizer is one file here.

importer.py    what an importer is; the registry of all; a folder's settings and its matrices
"""
