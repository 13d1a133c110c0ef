"""Paged key/value cache: pages from a pool, shared, forked, cropped and windowed per sequence."""

from .manager import KVCacheManager, PrefixHit
from .pool import OutOfPagesError
from .static import CachePolicy, next_slots
from .stats import CacheStats, GroupStats
from .step import CacheStep

__all__ = [
    "CachePolicy",
    "CacheStats",
    "CacheStep",
    "GroupStats",
    "KVCacheManager",
    "OutOfPagesError",
    "PrefixHit",
    "next_slots",
]
