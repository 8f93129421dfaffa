# SPDX-License-Identifier: Apache-2.0
"""The package indexes that this user's pip is configured for.

`pip config list` answers, because pip's configuration files and their order differ by platform. Without pip, as in
environments that uv made, pip's environment variables are read.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from typing import NamedTuple
from urllib.parse import urlsplit

from ._text import IndexUnreachable


class PipConfig(NamedTuple):
    """pip's settings of package indexes; `index_url` None: pip's built-in default."""

    index_url: str | None = None
    extra_index_urls: tuple[str, ...] = ()
    cert: str | None = None
    proxy: str | None = None


def parse_config(listing: str) -> PipConfig:
    """Parse the output of `pip config list`: lines `section.key='value'`."""
    values: dict[str, str] = {}
    # Later sections win, as in pip: [global], then the section of the command, then PIP_* variables.
    for section in ("global", "install", ":env:"):
        for line in listing.splitlines():
            name, equals, literal = line.partition("=")
            if equals and name.startswith(section + "."):
                try:
                    values[name.removeprefix(section + ".")] = str(ast.literal_eval(literal))
                except (ValueError, SyntaxError):
                    # pip prints warnings between the settings.
                    continue
    return PipConfig(
        index_url=values.get("index-url") or None,
        extra_index_urls=tuple(values.get("extra-index-url", "").split()),
        cert=values.get("cert") or None,
        proxy=values.get("proxy") or None,
    )


def pip_config() -> PipConfig:
    """Read this interpreter's or the path's pip configuration; raise IndexUnreachable if rejected."""
    for command in ([sys.executable, "-m", "pip"], ["pip"]):
        try:
            done = subprocess.run([*command, "config", "list"], capture_output=True, text=True, check=False)
        except FileNotFoundError:
            continue
        if done.returncode == 0:
            return parse_config(done.stdout)
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        if not last.endswith("No module named pip"):
            raise IndexUnreachable(f"pip config list failed: {last}; repair pip's configuration")
    settings = {name[4:].lower().replace("_", "-"): value for name, value in os.environ.items() if name[:4] == "PIP_"}
    return parse_config("\n".join(f":env:.{name}={value!r}" for name, value in settings.items()))


def host_of(url: str) -> str | None:
    """Return an http(s) address's host for messages, else None.

    The address may hold a password.
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        return None
    return parts.hostname if parts.scheme in ("http", "https") else None
