# SPDX-License-Identifier: Apache-2.0
"""Attention backends that declare their capabilities. Importing this package imports no vLLM."""
