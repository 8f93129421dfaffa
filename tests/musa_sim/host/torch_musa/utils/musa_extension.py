# SPDX-License-Identifier: Apache-2.0
"""The builder of extensions on a host that has no ``mcc``."""


def load(*_, **__):
    raise OSError("MUSA_HOME environment variable is not set: the simulated host has no mcc")
