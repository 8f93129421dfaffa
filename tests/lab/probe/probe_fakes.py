# SPDX-License-Identifier: Apache-2.0
"""A backend that ends its process, or never answers.

The probe's process imports this file by name, as it would a backend of another package.
"""

from __future__ import annotations

import os
import time

from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl


class _DyingImpl(CPUAttentionBackendImpl):
    def forward(self, *arguments, **options):
        if self.alibi_slopes is not None:
            os.abort() if self.head_size <= 256 else time.sleep(3600)
        return super().forward(*arguments, **options)


class Dies(CPUAttentionBackend):
    """Aborts on a layer with ALiBi, and hangs where its heads are large."""

    @staticmethod
    def get_impl_cls():
        return _DyingImpl
