# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.pages [--check]`` in the source tree: write the pages, or say which are old."""

from __future__ import annotations

import argparse
import sys

from ._pages import outdated, write
from ._read import ResultsError


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pages", description="The pages of benchmarks/results.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a page is old")
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
        print(f"{path} is not what benchmarks/results says: 'make docs' writes it again", file=sys.stderr)
    return 1 if old else 0


if __name__ == "__main__":
    sys.exit(main())
