# SPDX-License-Identifier: Apache-2.0
"""The development tree: links to stock files and to our modules, patched copies.

A change of a module is live at once (its link leads into the repository). A change of
a patched copy, or of a stock file made a copy by `edit`, is live too, and becomes a
patch by `refresh`.
"""

import json
import os
import shutil
import stat
import sys
import sysconfig
from dataclasses import dataclass, field
from importlib.metadata import Distribution
from pathlib import Path

from .compose import VERSION_MODULE, Series, compose
from .errors import SeriesError
from .files import write_all
from .native import build_native
from .patch import blob_id
from .stock import Stock, check_unedited, package_files
from .wheel import write_dist_info

DEFAULT = Path("build/tree")
STATE = ".series-tree.json"


@dataclass
class State:
    """What a tree was composed from."""

    stock: str
    target: str
    # The blob id that each real file had when it was composed, by path.
    copies: dict[str, str] = field(default_factory=dict)

    def save(self, directory: Path) -> None:
        text = json.dumps(vars(self), indent=1, sort_keys=True)
        write_all(directory, {STATE: text.encode()})


def load_state(directory: Path) -> State:
    """Reads the state of the tree in `directory`."""
    try:
        return State(**json.loads((directory / STATE).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise SeriesError(
            f"{directory} is no tree of this series: run `python -m series tree` first"
        ) from error


def real_files(directory: Path) -> list[str]:
    """Returns the paths of the package's files that are no links."""
    return [
        path for path in package_files(directory) if not (directory / path).is_symlink()
    ]


def make_tree(
    series: Series,
    stock: Stock,
    target: str,
    directory: Path,
    force: bool = False,
    native: Path | None = None,
) -> list[str]:
    """Composes or updates the tree in `directory`.

    Args:
        series: This repository's part.
        stock: An unpacked stock vLLM; the tree links to it.
        target: "cpu" or "cuda".
        directory: Where the tree is, or will be.
        force: Whether to drop edits that `refresh` did not take yet.
        native: Where to build the native part, which the tree links to; None to do
            without.

    Returns:
        The paths of the edited copies that were kept.

    Raises:
        SeriesError: an edited copy would have to change, or `directory` is another's.
    """
    check_unedited(stock.location)
    before = State("", "")
    if directory.exists() and any(directory.iterdir()):
        before = load_state(directory)
    contents = compose(series, stock, target)
    links = {path: stock.location / path for path in stock.paths()} | dict(
        series.modules
    )
    if native is not None:
        links |= build_native(series.root, target, native)
    copies = {path: contents[path] for path in contents if path not in series.modules}
    for path in copies:
        links.pop(path, None)
    after = State(str(stock.location), target)
    after.copies = {path: blob_id(content) for path, content in copies.items()}

    kept: list[str] = []
    for path in [] if force else real_files(directory):
        if path not in links and path not in after.copies or path == VERSION_MODULE:
            continue  # something new, which `refresh` tells about, or ours to write
        composed = after.copies.get(path) or blob_id(links[path].read_bytes())
        found = blob_id((directory / path).read_bytes())
        known = before.copies.get(path)
        if path in series.modules:
            base = composed
        else:  # what the copy was made from, by the tree or by an editor
            base = known or blob_id(stock.read(path) or b"")
        if found not in (base, composed):
            if base != composed:
                raise SeriesError(
                    f"{path} was edited in {directory}, and the series has changed it "
                    "since: save your edit elsewhere, or drop it with --force"
                )
            kept.append(path)
        elif found != composed or not known:
            continue  # not edited: composed anew
        if path not in series.modules:
            after.copies[path] = composed
        copies.pop(path, None)
        links.pop(path, None)

    _remove_stale(directory, {*links, *copies, *kept, *after.copies})
    directory.mkdir(parents=True, exist_ok=True)
    for path, source in links.items():
        _link(directory / path, source)
    changed = {
        path: content
        for path, content in copies.items()
        if (directory / path).is_symlink()
        or not (directory / path).exists()
        or (directory / path).read_bytes() != content
    }
    write_all(directory, changed)
    for path in changed:
        _make_editable(directory / path)
    for old in directory.glob("*.dist-info"):
        shutil.rmtree(old)
    _write_command(directory, write_dist_info(series, stock, target, directory))
    after.save(directory)
    return kept


def _remove_stale(directory: Path, wanted: set[str]) -> None:
    for path in package_files(directory):
        if path not in wanted and (directory / path).is_symlink():
            (directory / path).unlink()


def _link(path: Path, source: Path) -> None:
    source = source.resolve()
    if path.is_symlink() and os.readlink(path) == str(source):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(source)


def _make_editable(path: Path) -> None:
    path.chmod(path.stat().st_mode | stat.S_IWUSR)


def _write_command(directory: Path, dist_info: Path) -> None:
    (dist_info / "INSTALLER").write_text("series\n")
    scripts = Distribution.at(dist_info).entry_points.select(group="console_scripts")
    for script in scripts:
        path = directory / "bin" / script.name
        path.parent.mkdir(exist_ok=True)
        # The engine's processes import this file again, and must not run it.
        path.write_text(
            f"#!{sys.executable}\nimport sys\n\n"
            f"sys.path.insert(0, {str(directory)!r})\n"
            f'if __name__ == "__main__":\n'
            f"    from {script.module} import {script.attr}\n\n"
            f"    sys.exit({script.attr}())\n"
        )
        path.chmod(0o755)


def edit(directory: Path, path: str) -> None:
    """Turns the link at `path` in the tree into a copy that can be edited."""
    state = load_state(directory)
    path = tree_path(directory, path)
    place = directory / path
    if not place.is_symlink():
        if place.is_file():
            return  # a copy already
        raise SeriesError(f"{directory} has no file {path}")
    if Path(state.stock).resolve() not in place.resolve().parents:
        raise SeriesError(
            f"{path} is this repository's own: edit it there ({place.resolve()})"
        )
    content = place.read_bytes()
    write_all(directory, {path: content})
    _make_editable(place)
    state.copies[path] = blob_id(content)
    state.save(directory)


def tree_path(directory: Path, path: str) -> str:
    """Returns `path` as it is below the tree, however it was given."""
    given = Path(os.path.abspath(path))  # not resolved: it may be a link
    if given.is_relative_to(directory):
        return given.relative_to(directory).as_posix()
    return path


def install_path(directory: Path, site_packages: Path | None) -> list[Path]:
    """Puts the tree on the path of an interpreter, and returns the files written.

    Args:
        directory: The tree.
        site_packages: Where the `.pth` file goes; None stands for the running
            interpreter, which gets the tree's commands too.
    """
    folder = site_packages or Path(sysconfig.get_path("purelib"))
    if (folder / "vllm").exists():
        # Directories named in a .pth file come after the one that it lies in.
        raise SeriesError(
            f"the vLLM installed in {folder} would hide the tree: uninstall it first"
        )
    pth = folder / "vllm-hidden-states.pth"
    write_all(folder, {pth.name: f"{directory}\n".encode()})
    written = [pth]
    if site_packages is None:
        for script in sorted((directory / "bin").iterdir()):
            written.append(Path(sysconfig.get_path("scripts")) / script.name)
            _link(written[-1], script)
    return written
