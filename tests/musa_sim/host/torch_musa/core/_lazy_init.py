# SPDX-License-Identifier: Apache-2.0
import os

_first = os.getpid()


def _is_in_bad_fork():
    return os.getpid() != _first


def _lazy_init():
    if _is_in_bad_fork():
        raise RuntimeError(
            "Cannot re-initialize MUSA in forked subprocess. To use MUSA with multiprocessing, you must use the "
            "'spawn' start method"
        )


def _lazy_call(callback, **_):
    callback()
