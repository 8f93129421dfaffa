# SPDX-License-Identifier: Apache-2.0
"""Linear layers of few tokens whose weight loads overlap, and the norms between them."""
