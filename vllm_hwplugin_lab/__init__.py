# SPDX-License-Identifier: Apache-2.0
"""For who measures: engines with and without the plugin in turn, single kernels, and what attention backends declare.

No process that serves imports it: the commands `bench`, `demo` and `probe` do, and the processes that they start.
"""
