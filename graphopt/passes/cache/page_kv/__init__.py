"""Attention over a cache that grows becomes attention that owns its cache, in pages."""

from graphopt.passes.cache.page_kv.page_kv import Page, PageKV, page_attention

__all__ = [
    "Page",
    "PageKV",
    "page_attention",
]
