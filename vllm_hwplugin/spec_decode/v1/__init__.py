# SPDX-License-Identifier: Apache-2.0
"""What the hunks in Model Runner V1 and in its proposers call."""
