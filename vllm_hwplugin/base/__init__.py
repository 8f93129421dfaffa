# SPDX-License-Identifier: Apache-2.0
"""What every package may import: environment variables, run records, errors, versions, the cache folder."""
