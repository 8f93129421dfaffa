# SPDX-License-Identifier: Apache-2.0
"""No write on reject: rejected draft tokens leave no trace in the target's KV cache (docs/nwor.md)."""
