# SPDX-License-Identifier: Apache-2.0
"""Our wheel: its metadata, and packing it."""

import os
import re
import tempfile
import tomllib
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipInfo

from packaging.markers import Marker
from packaging.metadata import (
    Metadata,
    RawMetadata,
    RFC822Message,
    parse_email,
)
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.tags import parse_tag
from packaging.utils import canonicalize_name
from wheel.wheelfile import WheelFile

from .compose import Series, compose
from .errors import SeriesError
from .native import build_native
from .release import UPSTREAM_RELEASE, version
from .stock import Stock, check_target, wheel_tag

OUR_LICENCE = "hidden-states/LICENSE"
# On the registry these are CUDA builds, which break beside the CPU wheel's torch: the
# CPU wheel asks for them only where an extra says so.
CUDA_ONLY = {"torchvision": "vision", "torchaudio": "audio", "torchcodec": "audio"}


def dist_info_name(target: str) -> str:
    """Returns the name of our wheel's metadata directory."""
    return f"vllm-{version(target)}.dist-info"


def dist_info(series: Series, stock: Stock, target: str) -> dict[str, bytes]:
    """Returns the files of our dist-info directory but for RECORD, by name."""
    check_target(stock, target)
    files = {
        "METADATA": metadata(_read(stock, "METADATA"), series.root, target),
        "WHEEL": _wheel_file(stock),
        "entry_points.txt": _read(stock, "entry_points.txt"),
        "top_level.txt": _read(stock, "top_level.txt"),
    }
    raw, _ = parse_email(_read(stock, "METADATA"))
    for name in raw.get("license_files", []):
        files[f"licenses/{name}"] = _read(stock, f"licenses/{name}")
    files[f"licenses/{OUR_LICENCE}"] = (series.root / "LICENSE").read_bytes()
    return files


def _read(stock: Stock, name: str) -> bytes:
    content = stock.read(f"{stock.dist_info}/{name}")
    if content is None:
        raise SeriesError(f"{stock.location} has no {name} in its metadata")
    return content


def metadata(stock: bytes, root: Path, target: str) -> bytes:
    """Returns our METADATA, made from the stock wheel's and our pyproject.toml."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    raw, unknown = parse_email(stock)
    if unknown:
        raise SeriesError(f"the stock metadata has unknown fields: {sorted(unknown)}")
    raw["name"] = project["name"]
    raw["version"] = version(target)
    raw["summary"] = project["description"]
    raw["requires_python"] = project["requires-python"]
    raw["classifiers"] = [
        text
        for text in raw.get("classifiers", [])
        if not (match := re.fullmatch(r".* :: Python :: (\d+\.\d+)", text))
        or SpecifierSet(project["requires-python"]).contains(match[1])
    ]
    raw["license_files"] = [*raw.get("license_files", []), OUR_LICENCE]
    # Upstream's packagers do not maintain this wheel, nor do they take its bugs.
    raw.pop("maintainer", None)
    raw.pop("maintainer_email", None)
    raw.get("project_urls", {}).pop("Bug Tracker", None)
    raw["description"] = _description(root)
    if target == "cpu":
        _move_to_extras(raw)
    valid = Metadata.from_raw(raw).as_rfc822()
    message = RFC822Message()
    for name, value in valid.items():  # packaging writes the names in small letters
        message[name.title().replace("-Url", "-URL")] = value
    message.set_payload(valid.get_payload())
    return message.as_bytes()


def _description(root: Path) -> str:
    readme = root / "README.md"
    if readme.exists():
        return readme.read_text()
    return f"vLLM {UPSTREAM_RELEASE} in which hidden states are first class.\n"


def _move_to_extras(raw: RawMetadata) -> None:
    requirements = []
    extras = list(raw.get("provides_extra", []))
    for text in raw.get("requires_dist", []):
        requirement = Requirement(text)
        extra = CUDA_ONLY.get(canonicalize_name(requirement.name))
        if extra is not None and "extra" not in str(requirement.marker):
            condition = f'extra == "{extra}"'
            if requirement.marker is not None:
                condition = f"({requirement.marker}) and {condition}"
            requirement.marker = Marker(condition)
            text = str(requirement)
            if extra not in extras:
                extras.append(extra)
        requirements.append(text)
    raw["requires_dist"] = requirements
    raw["provides_extra"] = extras


def _wheel_file(stock: Stock) -> bytes:
    lines = ["Wheel-Version: 1.0", "Generator: vllm-hidden-states"]
    lines.append("Root-Is-Purelib: false")
    if stock.wheel is not None:
        tags = parse_tag(wheel_tag(stock.location.name))
        lines += sorted(f"Tag: {tag}" for tag in tags)
    return ("\n".join(lines) + "\n").encode()


def build(series: Series, wheel: Path, target: str, output: Path) -> Path:
    """Builds our wheel from the stock `wheel`, and returns its path in `output`."""
    stock = Stock(wheel)
    tag = wheel_tag(wheel.name)
    information = {
        f"{dist_info_name(target)}/{name}": content
        for name, content in dist_info(series, stock, target).items()
    }
    composed = compose(series, stock, target)
    with tempfile.TemporaryDirectory(prefix="native-") as folder:
        native = build_native(series.root, target, Path(folder))
        composed |= {name: path.read_bytes() for name, path in native.items()}
    output.mkdir(parents=True, exist_ok=True)
    final = output / f"vllm-{version(target)}-{tag}.whl"
    with tempfile.TemporaryDirectory(prefix=".wheel-", dir=output) as folder:
        path = Path(folder) / final.name
        with _Archive(path, "w") as archive:
            for entry in stock.entries():
                archive.time = max(archive.time, entry.date_time)
                content = composed.pop(entry.filename, None)
                if content is None:
                    content = stock.read(entry.filename)
                archive.writestr(entry, content)
            for name, content in (composed | information).items():
                archive.writestr(name, content)
        os.replace(path, final)
    return final


class _Archive(WheelFile):  # type: ignore[misc]
    """A wheel whose new entries, RECORD too, bear the stock wheel's time.

    The same input gives the same wheel.
    """

    time = (1980, 1, 1, 0, 0, 0)

    def writestr(
        self,
        zinfo_or_arcname: str | ZipInfo,
        data: Any,
        compress_type: int | None = None,
    ) -> None:
        if isinstance(zinfo_or_arcname, str):
            new = ZipInfo(zinfo_or_arcname, self.time)
            new.external_attr = 0o100644 << 16
        else:
            new = ZipInfo(zinfo_or_arcname.filename, zinfo_or_arcname.date_time)
            new.external_attr = zinfo_or_arcname.external_attr
        super().writestr(new, data, ZIP_DEFLATED)


def write_dist_info(series: Series, stock: Stock, target: str, output: Path) -> Path:
    """Writes our dist-info directory into `output`, and returns its path."""
    folder = output / dist_info_name(target)
    for name, content in dist_info(series, stock, target).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder
