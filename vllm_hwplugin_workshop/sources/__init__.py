# SPDX-License-Identifier: Apache-2.0
"""Where the text of a vLLM version comes from, without importing vLLM.

Every source has a `label`, a `version` and `read(path)`, which is what the patch engine asks of one. The package index
is reached with optional libraries (extra `drift`); files and folders need none.
"""

from ._ahead import ReadSource, read_ahead
from ._background import run_all
from ._errors import BadTarget, BadTree, BadWheel, IndexUnreachable, MissingTool, SourceError, UnknownVersion
from ._index import Index, IndexSource
from ._pipconfig import PipConfig
from ._target import distribution_of, open_installed, open_target
from ._tree import TreeSource
from ._wheel import WheelSource

__all__ = [
    "BadTarget",
    "BadTree",
    "BadWheel",
    "Index",
    "IndexSource",
    "IndexUnreachable",
    "MissingTool",
    "PipConfig",
    "ReadSource",
    "SourceError",
    "TreeSource",
    "UnknownVersion",
    "WheelSource",
    "distribution_of",
    "open_installed",
    "open_target",
    "read_ahead",
    "run_all",
]
