# SPDX-License-Identifier: Apache-2.0
"""Where the text of a vLLM version comes from, without importing vLLM.

Every source has a `label`, a `version` and `read(path)`, which is what the patch engine asks of one. The package index
is reached with optional libraries (extra ``workshop``); files and folders need none.
"""

from ._index import Index, IndexSource
from ._pip import PipConfig
from ._target import distribution_of, open_installed, open_target
from ._text import IndexUnreachable, SourceError, TreeSource, WheelSource

__all__ = [
    "Index",
    "IndexSource",
    "IndexUnreachable",
    "PipConfig",
    "SourceError",
    "TreeSource",
    "WheelSource",
    "distribution_of",
    "open_installed",
    "open_target",
]
