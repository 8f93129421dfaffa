# SPDX-License-Identifier: Apache-2.0
"""What the hunks in patches/ call. Runs inside vLLM's processes, so it may import torch and vLLM; never `patching`."""
