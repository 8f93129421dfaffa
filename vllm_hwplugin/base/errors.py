# SPDX-License-Identifier: Apache-2.0
"""The root of the project's errors."""


class HwpluginError(Exception):
    """Base of every error that the project raises on purpose.

    The message says what, where, found, expected, and the way out. The command line prints it without a traceback.
    """
