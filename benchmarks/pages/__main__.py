# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.pages [--check]`` in the source tree: write the pages, or list outdated ones."""

from __future__ import annotations

import argparse
import sys

from ._pages import outdated, write
from ._read import ResultsError


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pages", description="The pages of benchmarks/results.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is outdated")
    check = parser.parse_args().check
    try:
        if not check:
            write()
            return 0
        old = outdated()
    except ResultsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for path in old:
        print(f"{path} differs from benchmarks/results: run 'make docs' to write it again", file=sys.stderr)
    return 1 if old else 0


if __name__ == "__main__":
    sys.exit(main())
