# SPDX-License-Identifier: Apache-2.0
"""The platform class to offer to vLLM: :mod:`.cuda` for NVIDIA, :mod:`..musa.platform` for Moore Threads.

vLLM asks for the class while vLLM itself is being imported. So this package's imports load neither vLLM nor torch nor
the patch engine; the classes do, and vLLM imports the chosen class by name.
"""

from ._offer import CLASSES, GATE, GROUP, KEY, Decision, PlatformError, foresee, must_hold, note_used, offer, others
