# SPDX-License-Identifier: Apache-2.0
"""Exact, versioned source patches for vLLM's speculative decoding, applied at import time.

vLLM loads :func:`vllm_hwplugin.plugin.register` by its entry point in every process. This module stays empty of imports
so that naming the package costs a process nothing.
"""

__version__ = "0.3.0"
