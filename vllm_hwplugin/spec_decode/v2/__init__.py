# SPDX-License-Identifier: Apache-2.0
"""What the hunks in patches/v2-* call, in Model Runner V2's half of speculative decoding."""
