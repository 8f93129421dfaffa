# SPDX-License-Identifier: Apache-2.0
"""Linear layers of few tokens that overlap, and the norms between them."""
