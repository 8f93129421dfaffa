# SPDX-License-Identifier: Apache-2.0
"""``python -m vllm_hwplugin.ops.compile FOLDER``: build every kernel into a folder; exit 1 if a build fails.

For continuous integration, which has no GPU: ``TORCH_CUDA_ARCH_LIST`` names the architectures.
"""

from __future__ import annotations

import sys
from pathlib import Path

from .ahead import build_all
from .spec import KERNELS, source_root

if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
    sys.exit("usage: python -m vllm_hwplugin.ops.compile FOLDER")
libraries = build_all(Path(sys.argv[1]).absolute(), source_root(), print)
sys.exit(0 if len(libraries) == len(KERNELS) else 1)
