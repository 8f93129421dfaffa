# SPDX-License-Identifier: Apache-2.0
"""Hardened containers: mounts are made for real, in a namespace of their own, and another user looks for a place."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "containers.md"
NOBODY = 65534
IMAGE = "/mnt/image"
EMPTY_DIR = "mount -t tmpfs -o mode=0777 tmpfs"

pytestmark = pytest.mark.slow

NEEDED = sorted({sys.base_prefix, sys.prefix, str(ROOT)})

#: What a process of vLLM would come to, then what `doctor` says of it.
LOOK = """
import json, logging, sys
from vllm_hwplugin.cli._diagnosis import diagnose
from vllm_hwplugin.patching import install
logging.disable()
said = diagnose()
found = install()
live = sorted(name for name, item in found.features.items() if item["state"] == "live")
print(json.dumps({
    "exit_code": said.exit_code,
    "said_live": sorted(row.id for row in said.features if row.state == "live"),
    "live": live,
    "place": found.overlay if live else None,
}))
"""


def _namespace() -> Iterator[str]:
    """What makes a read-only root, with the shared memory that Docker gives, out of this host's."""
    yield "set -e; mount --make-rprivate /; mount -t tmpfs tmpfs /mnt"
    for number, path in enumerate(NEEDED):
        yield f"mkdir /mnt/{number}; mount --bind {shlex.quote(path)} /mnt/{number}"
    for one in sorted({str(one) for path in NEEDED for one in Path(path).parents if not one.stat().st_mode & 0o001}):
        yield f"mount -t tmpfs -o mode=755 tmpfs {shlex.quote(one)}"
    yield from _needed()
    yield "mount -t tmpfs -o mode=1777,nosuid,nodev,noexec,size=64m tmpfs /dev/shm"
    yield f"install --directory --mode 700 --owner {NOBODY} --group {NOBODY} {IMAGE}"


def _needed() -> Iterator[str]:
    """Puts back what a mount has hidden, such as a checkout in /tmp."""
    for number, path in enumerate(map(shlex.quote, NEEDED)):
        yield f"[ -e {path} ] || {{ mkdir -p {path}; mount --bind /mnt/{number} {path}; }}"


def _python(program: str, environ: dict[str, str]) -> str:
    variables = (f"{name}={value}" for name, value in {"PYTHONPATH": str(ROOT), **environ}.items())
    nobody = "setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"
    return shlex.join([*nobody, "env", "-i", "PATH=/usr/bin:/bin", *variables, sys.executable, "-B", "-c", program])


def pod(setup: str, environ: dict[str, str], *before: str) -> dict[str, object]:
    """What `LOOK` prints there, after `before` ran where everything can still be written to."""
    steps = [
        *_namespace(),
        *before,
        "mount -o remount,bind,ro /; mount -o remount,ro /mnt",
        setup,
        *_needed(),
        f"cd /; exec {_python(LOOK, environ)}",
    ]
    done = subprocess.run(["unshare", "--mount", "sh", "-c", "\n".join(steps)], capture_output=True, text=True)
    if "unshare" in done.stderr or "permission denied" in done.stderr:
        pytest.skip(f"no mount can be made here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


TEMPORARY, SHARED = f"/tmp/vllm-hwplugin-{NOBODY}", f"/dev/shm/vllm-hwplugin-{NOBODY}"


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare")
@pytest.mark.parametrize(
    ("setup", "environ", "place"),
    [
        pytest.param("", {}, SHARED, id="nothing but shared memory"),
        pytest.param("mount -t tmpfs tmpfs /tmp", {"HOME": "/"}, TEMPORARY, id="docker --tmpfs"),
        pytest.param(f"{EMPTY_DIR} /tmp", {"HOME": "/tmp"}, SHARED, id="emptyDir"),
        pytest.param(f"{EMPTY_DIR} /tmp; {EMPTY_DIR} /dev/shm", {"HOME": "/tmp"}, None, id="emptyDir twice"),
        pytest.param("mount -o remount,ro /dev/shm", {}, None, id="nothing at all"),
    ],
)
def test_a_place_is_found_or_doctor_ends_with_1(setup: str, environ: dict[str, str], place: str | None) -> None:
    found = pod(setup, environ)
    assert found["place"] == place
    assert found["said_live"] == found["live"]
    assert found["exit_code"] == (place is None)


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare")
@pytest.mark.parametrize("gates", [{}, {"VLLM_HWPLUGIN_DRAFT_FULL_GRAPH": "off"}], ids=["the same", "other gates"])
def test_copies_in_the_image_serve_where_nothing_can_be_written_to(gates: dict[str, str]) -> None:
    (line,) = [args for name, args in instructions() if name == "RUN" and "register()" in args]
    register = shlex.split(line)[-1]
    image = {"HOME": "/tmp", "VLLM_HWPLUGIN_CACHE_DIR": IMAGE}
    nowhere = f"{EMPTY_DIR} /tmp; {EMPTY_DIR} /dev/shm"
    found = pod(nowhere, image | gates, _python(register, image))
    assert found["said_live"] == found["live"]
    # Other gates make other texts, which the image does not have.
    assert ("v1-step-inputs" in str(found["live"])) == (not gates)
    assert (found["place"], found["exit_code"]) == (IMAGE, 0)


def instructions() -> list[tuple[str, str]]:
    (text,) = re.findall(r"^```dockerfile\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    lines = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", "").splitlines()
    return [(name, args.strip()) for line in lines if line for name, _, args in [line.partition(" ")]]
