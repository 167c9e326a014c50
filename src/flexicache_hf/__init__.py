"""FlexiCache (arXiv 2511.00868) as a drop-in key-value cache for Hugging Face transformers."""

from .cache import FlexiCacheDynamicCache
from .config import FlexiCacheConfig
from .errors import (
    AttentionNotLinked,
    FlexiCacheWarning,
    InterruptedChange,
    InterruptedForward,
)
from .integration.attention import register, restore_attention
from .memory import MemoryUsage
from .profiles.profile import HeadProfile
from .stats import CacheStats
from .tiers.host_pages import HostMemoryError

register()

__all__ = [
    "AttentionNotLinked",
    "CacheStats",
    "FlexiCacheConfig",
    "FlexiCacheDynamicCache",
    "FlexiCacheWarning",
    "HeadProfile",
    "HostMemoryError",
    "InterruptedChange",
    "InterruptedForward",
    "MemoryUsage",
    "restore_attention",
]
