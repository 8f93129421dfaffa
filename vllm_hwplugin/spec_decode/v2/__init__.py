# SPDX-License-Identifier: Apache-2.0
"""Functions that the hunks in patches/v2-* call, for Model Runner V2."""
