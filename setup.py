# SPDX-License-Identifier: Apache-2.0
"""The part of the build that pyproject.toml cannot express.

``patches/`` and ``csrc/`` lie apart from the Python code in the source tree; in the wheel they lie inside the package,
where ``vllm_hwplugin`` finds them.

If torch and its compiler are present, as with ``pip install --no-build-isolation .``, kernels are built ahead of time
and the wheel is for this platform and every Python version. Otherwise the wheel is pure Python and kernels are built at
first use. No failure of a compiler fails the installation.
"""

import gzip
import importlib.util
import os
import shutil
import sys
import sysconfig
import tarfile
from pathlib import Path

import setuptools

# Without build isolation pyproject.toml's requirement does not count, and an older setuptools fails later with a
# message that names neither itself nor a way out.
if int(setuptools.__version__.partition(".")[0]) < 77:
    raise SystemExit(
        f"vllm-hwplugin is built with setuptools 77 or newer, and this environment has {setuptools.__version__}: "
        "run `pip install 'setuptools>=77'`, or build with isolation"
    )

from setuptools import find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).parent
PACKAGES = ("vllm_hwplugin", "vllm_hwplugin_workshop", "vllm_hwplugin_lab")
DATA_FOLDERS = {"vllm_hwplugin.patches": "patches", "vllm_hwplugin.csrc": "csrc"}


def say(text):
    print(f"vllm-hwplugin: {text}", file=sys.stderr)


def build_kernels(package):
    """Build into a copy of the package; return the libraries."""
    if importlib.util.find_spec("torch") is None:
        say("no kernel is built ahead of time: torch is not visible here; use `pip install --no-build-isolation`")
        return ()
    sys.path.insert(0, str(ROOT))
    try:
        from vllm_hwplugin.ops.compile.ahead import PREBUILT, build_all
    except ImportError as error:
        say(f"no kernel is built ahead of time: {error}")
        return ()
    finally:
        sys.path.remove(str(ROOT))
    return build_all(package / PREBUILT, (ROOT / "csrc").resolve(), say)


class BuildWithKernels(build_py):
    libraries = ()

    def run(self):
        # An editable installation runs from the source tree, where the build adds and removes no file.
        if self.editable_mode:
            super().run()
            return
        for name in PACKAGES:
            package = (Path(self.build_lib) / name).absolute()
            if package.exists() and not package.samefile(ROOT / name):
                # setuptools only adds to this folder: a patch or module of an earlier build that the tree no longer has
                # would be installed and applied.
                shutil.rmtree(package)
        super().run()
        self.libraries = build_kernels((Path(self.build_lib) / "vllm_hwplugin").absolute())

    def get_outputs(self, include_bytecode=True):
        records = [path.with_name("built.json") for path in self.libraries]
        return [*super().get_outputs(include_bytecode), *map(str, [*self.libraries, *records])]


class PlatformWheel(bdist_wheel):
    """A wheel for a platform but any Python: libraries use PyTorch's stable ABI and no header of Python."""

    def has_libraries(self):
        return bool(self.get_finalized_command("build_py").libraries)

    def get_tag(self):
        if not self.has_libraries():
            return super().get_tag()
        platform = self.plat_name if self.plat_name_supplied else sysconfig.get_platform()
        return "py3", "none", platform.replace("-", "_").replace(".", "_")

    def write_wheelfile(self, *args, **more):
        self.root_is_pure = not self.has_libraries()
        super().write_wheelfile(*args, **more)


class SourceArchive(sdist):
    """A reproducible archive: nothing of the user, the clock or the file system is in it."""

    def make_archive(self, base_name, format, root_dir=None, base_dir=None, **more):
        epoch = os.environ.get("SOURCE_DATE_EPOCH")
        if epoch is None or format != "gztar":
            return super().make_archive(base_name, format, root_dir, base_dir, **more)

        def plain(member):
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            member.mtime = int(epoch)
            member.mode = 0o755 if member.mode & 0o100 else 0o644
            return member

        path = f"{base_name}.tar.gz"
        with (
            open(path, "wb") as file,
            gzip.GzipFile("", "wb", fileobj=file, mtime=int(epoch)) as packed,
            tarfile.open(mode="w", fileobj=packed) as archive,
        ):
            archive.add(base_dir, filter=plain)
        return path


setup(
    packages=[*find_packages(include=["vllm_hwplugin*"]), *DATA_FOLDERS],
    package_dir=DATA_FOLDERS,
    package_data={**{name: ["py.typed"] for name in PACKAGES}, **{name: ["**/*"] for name in DATA_FOLDERS}},
    cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel, "sdist": SourceArchive},
)
