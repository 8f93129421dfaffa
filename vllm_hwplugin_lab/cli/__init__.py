# SPDX-License-Identifier: Apache-2.0
"""The commands `bench`, `demo` and `probe`, on typer and rich (the extra ``lab``)."""
