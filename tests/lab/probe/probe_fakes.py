# SPDX-License-Identifier: Apache-2.0
"""A backend that ends its process.

The probe's process imports this file by name, as it would a backend of another package.
"""

from __future__ import annotations

import os

from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl


class _DyingImpl(CPUAttentionBackendImpl):
    def forward(self, *arguments, **options):
        if self.alibi_slopes is not None and self.head_size <= 256:
            os.abort()
        return super().forward(*arguments, **options)


class Dies(CPUAttentionBackend):
    """Aborts on a layer with ALiBi and heads of a usual size."""

    @staticmethod
    def get_impl_cls():
        return _DyingImpl
