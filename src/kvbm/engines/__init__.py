"""Adapters, one folder an engine. Thin: an engine's types stop here, and nothing else of the project imports them."""

import sys

from kvbm import LINUX_ONLY

if sys.platform != "linux":
    raise ImportError(LINUX_ONLY)
