# SPDX-License-Identifier: Apache-2.0
"""Functions for Model Runner V2 that the hunks in `patches/v2-*` call."""
