# SPDX-License-Identifier: Apache-2.0
"""Attention backends that declare what they can do. Importing this package imports no vLLM."""
