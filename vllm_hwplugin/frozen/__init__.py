# SPDX-License-Identifier: Apache-2.0
"""Functions that the hunks in patches/frozen call: fixes only, no vLLM from 0.29 on has these hunks."""
