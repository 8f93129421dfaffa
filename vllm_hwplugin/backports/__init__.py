# SPDX-License-Identifier: Apache-2.0
"""Functions that the hunks in patches/backports call; they fix bugs of released vLLM versions."""
