# SPDX-License-Identifier: Apache-2.0
"""``doctor --paste``: a report for an issue, without what names a person, a host or a secret."""

from __future__ import annotations

import re
from pathlib import Path

# Absolute paths, and paths below `~`.
_PATH = re.compile(r"(?<![\w.…/~-])(?:~|(?=/))(?:/[^\s/:;,'\"()\[\]{}]+){2,}")
#: Folders that are the same on every host.
_PUBLIC = ("/usr/", "/proc/", "/dev/", "/sys/", "/etc/", "/lib/", "/lib64/")
_HOMES = re.compile(r"(?:/home|/Users|/var/home)/[^\s/:;,'\"()]+|/root(?![\w-])")
_URL = re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s'\"]+")
_ADDRESS = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b(?!\.)|\b(?:[0-9a-f]{1,4}:){4,7}[0-9a-f]{1,4}\b", re.IGNORECASE)
_SECRET = re.compile(
    r"\b(?:hf_|sk-|gh[pousr]_|github_pat_|glpat-|xox[a-z]-|AKIA)[\w-]{8,}"
    # Long, of digits and letters of both cases: no name of a feature, a variable or a kernel.
    r"|(?<![\w+-])(?=[\w+-]*\d)(?=[\w+-]*[a-z])(?=[\w+-]*[A-Z])[\w+-]{32,}={0,2}"
)
_NAMED = re.compile(
    r"(?i)((?:token(?!s)|secret|passw(?:or)?d|api[-_]?key|credential)[\w-]*['\"]?\s*[=:]\s*"
    r"|--[\w-]*(?:token(?!s)|secret|password|key)\s+)['\"]?[^\s'\",;]+"
)
#: Host names that say nothing.
_COMMON = {"localhost", "vllm", "ubuntu", "debian", "container"}


def redacted(text: str, *, home: Path, host: str) -> str:
    """Return a text without home folders, hosts, addresses and tokens.

    Args:
        home: The user's home folder.
        host: This host's name.
    """
    text = _URL.sub("URL", text)
    text = _NAMED.sub(r"\1***", text)
    text = _SECRET.sub("***", text)
    if home != Path("/"):
        text = text.replace(str(home), "~")
    text = _HOMES.sub("~", text)
    text = _PATH.sub(_shortened, text)
    for name in sorted({host, host.partition(".")[0]} - _COMMON, key=len, reverse=True):
        if len(name) > 2:
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", "HOST", text)
    return _ADDRESS.sub("ADDRESS", text)


def _shortened(match: re.Match[str]) -> str:
    """Return a private path with its last two names only."""
    path = match[0]
    if path.startswith(_PUBLIC):
        return path
    first, *names = path.split("/")
    return path if len(names) <= 2 else "/".join([first, "…", *names[-2:]])


def as_issue(report: str, problem: str) -> str:
    """Return a report as Markdown for an issue, under its verdict."""
    # A fence in a foreign text would end the report's.
    report = report.rstrip().replace("```", "` ` `")
    return f"**vllm-hwplugin doctor**: {problem}\n\n<details>\n\n```text\n{report}\n```\n\n</details>"
