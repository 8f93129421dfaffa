# SPDX-License-Identifier: Apache-2.0
"""Single kernels against their rivals: what ``bench attention`` and ``bench ops`` measure with.

What is measured and how often, and what follows from it, is decided without torch; only the child process
(``_child``) and what it imports needs a GPU.
"""
