# SPDX-License-Identifier: Apache-2.0
"""Stock files + modules + patches -> the contents that our vLLM has instead."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .errors import SeriesError
from .patch import Line, Patch, blob_id, join_lines, parse, split_lines
from .release import ROOT, UPSTREAM_RELEASE, version
from .stock import Stock, is_supported_release, package_files

VERSION_MODULE = "vllm/_version.py"


@dataclass(frozen=True)
class Series:
    """This repository's part: modules by path, and patches in order."""

    root: Path
    modules: Mapping[str, Path]
    patches: tuple[Patch, ...]

    def patched(self) -> list[str]:
        """Returns the paths that patches insert into, sorted."""
        return sorted({file.path for patch in self.patches for file in patch.files})

    def touching(self, path: str) -> list[str]:
        """Returns the names of the patches that insert into `path`, in order."""
        return [
            patch.name
            for patch in self.patches
            if any(file.path == path for file in patch.files)
        ]


def load(root: Path = ROOT) -> Series:
    """Reads `vllm/` and `patches/` below `root`."""
    modules = {
        path: root / path
        for path in package_files(root)
        if not any(part.startswith(".") for part in path.split("/"))
    }
    if "vllm/__init__.py" in modules:
        # An installed vLLM would be shadowed wherever Python runs in the repository.
        raise SeriesError("vllm/__init__.py must stay upstream's: remove it")
    patches = tuple(
        parse(name, (root / "patches" / name).read_bytes()) for name in _names(root)
    )
    for patch in patches:
        for file in patch.files:
            if file.path in modules or file.path == VERSION_MODULE:
                raise SeriesError(
                    f"{patch.name} inserts into {file.path}, which the series replaces "
                    "as a whole: edit the module instead"
                )
    _check_order(patches)
    return Series(root, modules, patches)


def _names(root: Path) -> list[str]:
    folder = root / "patches"
    listed = folder / "series"
    lines = listed.read_text().splitlines() if listed.exists() else []
    names = [line.split("#")[0].strip() for line in lines]
    names = [name for name in names if name]
    if len(set(names)) != len(names):
        raise SeriesError("patches/series names a patch twice")
    for name in names:
        if not (folder / name).is_file():
            raise SeriesError(f"patches/series names {name}, and there is no such file")
    for path in sorted(folder.glob("*.patch")):
        if path.name not in names:
            raise SeriesError(f"patches/{path.name} is not named in patches/series")
    return names


def _check_order(patches: tuple[Patch, ...]) -> None:
    left: dict[str, str] = {}  # the blob id that the patches so far leave, by path
    for patch in patches:
        for file in patch.files:
            if left.setdefault(file.path, file.old) != file.old:
                raise SeriesError(
                    f"{patch.name} is for {file.path} with blob id {file.old[:12]}, "
                    f"and the patches before it leave {left[file.path][:12]}: the "
                    "series is out of order"
                )
            left[file.path] = file.new


def patched_lines(series: Series, path: str, content: bytes) -> list[Line]:
    """Returns the lines of stock file `path` with all patches in, and their owners.

    Raises:
        SeriesError: a patch does not make the content that it promises.
    """
    lines: list[Line] = [(None, line) for line in split_lines(content)]
    for patch in series.patches:
        for file in patch.files:
            if file.path != path:
                continue
            lines = file.insert(lines, patch.name)
            made = blob_id(join_lines(lines))
            if made != file.new:
                raise SeriesError(
                    f"{patch.name} promises {path} with blob id {file.new[:12]}, and "
                    f"makes {made[:12]}: the patch was changed by hand"
                )
    return lines


def compose(series: Series, stock: Stock, target: str) -> dict[str, bytes]:
    """Returns all files that our vLLM has and `stock` has not, by path.

    Nothing is written. `stock` is looked at first, as a whole.

    Raises:
        SeriesError: `stock` is not the release that the series is for, not stock, or
            has the series already, all or in part.
    """
    found = stock.release()
    if not is_supported_release(found, version(target)):
        raise SeriesError(
            f"the series is for vLLM {UPSTREAM_RELEASE}, and {stock.location} holds "
            f"{f'vLLM {found}' if found else 'no vLLM'}"
        )
    state = {VERSION_MODULE: found == version(target)}
    for path, module in series.modules.items():
        state[path] = stock.read(path) == module.read_bytes()
    contents: dict[str, bytes] = {}
    for path in series.patched():
        contents[path] = stock.read(path) or b""
        state[path] = _is_patched(series, path, stock, str(found))
    if all(state.values()):
        raise SeriesError(f"the series is already applied to {stock.location}")
    if any(state.values()):
        done = [path for path, applied in state.items() if applied]
        left = [path for path, applied in state.items() if not applied]
        raise SeriesError(
            f"the series is applied to {stock.location} in part (to {done[0]}, not to "
            f"{left[0]}): reinstall the stock vLLM first"
        )
    for path, content in contents.items():
        contents[path] = join_lines(patched_lines(series, path, content))
    for path, module in series.modules.items():
        contents[path] = module.read_bytes()
    contents[VERSION_MODULE] = version_module(version(target))
    return contents


def _is_patched(series: Series, path: str, stock: Stock, found: str) -> bool:
    """Tells whether any patch is in `path` already; anything else must be stock."""
    content = stock.read(path)
    name = series.touching(path)[0]
    if content is None:
        raise SeriesError(
            f"{name} inserts into {path}, and {stock.location} has no such file"
        )
    chain = [file for p in series.patches for file in p.files if file.path == path]
    blob = blob_id(content)
    if blob == chain[0].old:
        return False
    if blob == chain[-1].new:
        return True
    if blob in [file.new for file in chain]:
        raise SeriesError(
            f"the series is applied to {stock.location} in part (only some patches of "
            f"{path}): reinstall the stock vLLM first"
        )
    raise SeriesError(
        f"{name} does not know this {path} (blob id {blob[:12]}, not "
        f"{chain[0].old[:12]}): the patch is for vLLM {UPSTREAM_RELEASE}, and "
        f"{stock.location} holds vLLM {found}, perhaps changed"
    )


def version_module(text: str) -> bytes:
    """Returns our `vllm/_version.py`, with the names that upstream's has."""
    release, local = text.split("+")
    parts = (*(int(part) for part in release.split(".")), local)
    return f'''# SPDX-License-Identifier: Apache-2.0
"""The version of this vLLM, written when it was built."""

__version__ = version = "{text}"
__version_tuple__ = version_tuple = {parts!r}
__commit_id__ = commit_id = None
'''.encode()
