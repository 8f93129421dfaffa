# SPDX-License-Identifier: Apache-2.0
"""Functions that the hunks in patches/ call, inside vLLM's processes: may import torch and vLLM, never `patching`."""
