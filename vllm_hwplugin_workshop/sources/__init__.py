# SPDX-License-Identifier: Apache-2.0
"""Sources of the text of vLLM versions, without importing vLLM.

Each source has `label`, `version` and `read(path)`, which the patch engine uses. Reading a package index needs optional
libraries (extra ``workshop``); files and folders need none.
"""

from ._index import Index, IndexSource
from ._pip import PipConfig
from ._target import distribution_of, open_installed, open_target
from ._text import IndexUnreachable, SourceError, TreeSource, WheelSource
