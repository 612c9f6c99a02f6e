# SPDX-License-Identifier: Apache-2.0
"""The development tree: composing, editing, and back to patches."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from series.errors import SeriesError
from series.patch import Line, join_lines
from series.refresh import assign, refresh
from series.stock import Stock, unpacked
from series.tree import edit, install_path, make_tree
from series.verify import verify

if TYPE_CHECKING:
    from pathlib import Path

    from tests.series.conftest import Sample

ALPHA, BETA, GAMMA = "vllm/alpha.py", "vllm/beta.py", "vllm/inner/gamma.py"
ONE, TWO = "0001-one.patch", "0002-two.patch"


@pytest.fixture
def tree(sample: Sample) -> Sample:
    sample.write_patch(ONE, {ALPHA: [(2, ["one", "uno"])], BETA: [(0, ["b"])]})
    sample.write_patch(TWO, {ALPHA: [(20, ["two", "dos"])]})
    sample.write_module("vllm/replaced.py", "new = 1\n")
    sample.write_module("vllm/added/new.py", "added = 1\n")
    sample.make_tree()
    return sample


def change(sample: Sample, path: str, old: str, new: str) -> None:
    place = sample.directory / path
    assert not place.is_symlink()
    text = place.read_text()
    assert text.count(old) == 1
    place.write_text(text.replace(old, new))


def inserted(sample: Sample, name: str, path: str) -> list[tuple[int, list[str]]]:
    (patch,) = [one for one in sample.series().patches if one.name == name]
    return [
        (hunk.after, [line.decode().strip() for line in hunk.lines])
        for file in patch.files
        if file.path == path
        for hunk in file.hunks
    ]


def refresh_tree(sample: Sample, patch: str | None = None) -> list[str]:
    """Refreshes, and checks that the patches then make what the tree holds."""
    done = refresh(sample.series(), sample.directory, patch)
    assert refresh(sample.series(), sample.directory) == [
        note for note in done if "in the tree alone" in note
    ]
    assert verify(sample.series(), Stock(sample.stock), "cpu") == []
    kept = sample.snapshot(sample.directory)
    assert sample.make_tree(force=True) == []
    after = sample.snapshot(sample.directory)
    del kept[".series-tree.json"], after[".series-tree.json"]
    assert after == kept
    return done


def refused(sample: Sample, message: str, patch: str | None = None) -> None:
    before = sample.snapshot(sample.folder)
    with pytest.raises(SeriesError, match=message):
        refresh(sample.series(), sample.directory, patch)
    assert sample.snapshot(sample.folder) == before


def test_tree(tree: Sample) -> None:
    top = tree.directory
    assert (top / "vllm/__init__.py").resolve() == tree.stock / "vllm/__init__.py"
    assert (top / "vllm/native.abi3.so").is_symlink()
    module = (top / "vllm/added/new.py").resolve()
    assert module == tree.root / "vllm/added/new.py"
    assert not (top / "vllm/added").is_symlink()
    assert not (top / ALPHA).is_symlink()
    assert b"two\n" in (top / ALPHA).read_bytes()
    assert (top / "bin/vllm").stat().st_mode & 0o111
    assert 'if __name__ == "__main__":' in (top / "bin/vllm").read_text()
    code = "import importlib.metadata as m; print(m.version('vllm'))"
    code += "; print(m.entry_points(name='vllm')['vllm'].value)"
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(top)},
        capture_output=True,
        text=True,
    )
    assert result.stdout.split() == [
        "0.32.0+hs.1.cpu",
        "vllm.entrypoints.cli.main:main",
    ]


def test_tree_twice_changes_nothing(tree: Sample) -> None:
    before = {path: path.lstat().st_mtime_ns for path in tree.directory.rglob("vllm/*")}
    tree.make_tree()
    assert before == {
        path: path.lstat().st_mtime_ns for path in tree.directory.rglob("vllm/*")
    }


def test_tree_follows_modules(tree: Sample) -> None:
    tree.write_module("vllm/added/more.py", "more = 1\n")
    (tree.root / "vllm/added/new.py").unlink()
    (tree.root / "vllm/replaced.py").unlink()
    tree.make_tree()
    assert (tree.directory / "vllm/added/more.py").read_text() == "more = 1\n"
    assert not (tree.directory / "vllm/added/new.py").is_symlink()
    stock = (tree.stock / "vllm/replaced.py").read_bytes()
    assert (tree.directory / "vllm/replaced.py").read_bytes() == stock


def test_tree_follows_patches(tree: Sample) -> None:
    tree.write_patch("0003-three.patch", {ALPHA: [(0, ["three"])], GAMMA: [(0, ["g"])]})
    tree.make_tree()
    assert (tree.directory / ALPHA).read_bytes().startswith(b"three\n")
    assert (tree.directory / GAMMA).read_bytes().startswith(b"g\n")
    (tree.root / "patches/0003-three.patch").unlink()
    tree.list_patches(ONE, TWO)
    tree.make_tree()
    assert (tree.directory / ALPHA).read_bytes().startswith(b"alpha 1\n")
    assert (tree.directory / GAMMA).is_symlink()


def test_tree_keeps_edits(tree: Sample) -> None:
    change(tree, ALPHA, "two\n", "two\nmore\n")
    edit(tree.directory, GAMMA)
    (tree.directory / GAMMA).write_text("edited\n")
    assert tree.make_tree() == [ALPHA, GAMMA]
    assert b"more\n" in (tree.directory / ALPHA).read_bytes()
    assert tree.make_tree(force=True) == []
    assert b"more\n" not in (tree.directory / ALPHA).read_bytes()
    assert (tree.directory / GAMMA).is_symlink()


@pytest.mark.parametrize("path", [ALPHA, GAMMA])
def test_tree_does_not_overwrite_edits(tree: Sample, path: str) -> None:
    edit(tree.directory, path)
    (tree.directory / path).write_text("edited\n")
    tree.write_patch("0003-three.patch", {path: [(0, ["three"])]})
    before = tree.snapshot(tree.directory)
    with pytest.raises(SeriesError, match=f"{path} was edited"):
        tree.make_tree()
    assert tree.snapshot(tree.directory) == before
    refused(tree, "have changed since")
    tree.make_tree(force=True)
    assert (tree.directory / path).read_bytes().startswith(b"three\n")


def test_tree_mends_what_was_not_edited(tree: Sample) -> None:
    """Links that became real files, and a patched copy that went away."""
    for path in ("vllm/empty.py", GAMMA, "vllm/added/new.py"):
        content = (tree.directory / path).read_bytes()
        (tree.directory / path).unlink()
        (tree.directory / path).write_bytes(content)
    (tree.directory / ALPHA).unlink()
    tree.write_patch("0003-three.patch", {"vllm/empty.py": [(0, ["three"])]})
    assert tree.make_tree() == []
    assert (tree.directory / "vllm/empty.py").read_bytes() == b"three\n"
    assert (tree.directory / GAMMA).is_symlink()
    assert (tree.directory / "vllm/added/new.py").is_symlink()
    assert b"two\n" in (tree.directory / ALPHA).read_bytes()


def test_tree_of_someone_else(tree: Sample) -> None:
    tree.directory = tree.folder / "other"
    (tree.directory / "vllm").mkdir(parents=True)
    with pytest.raises(SeriesError, match="no tree of this series"):
        tree.make_tree()


def test_edit_keeps_an_unchanged_copy(tree: Sample) -> None:
    edit(tree.directory, str(tree.directory / GAMMA))
    edit(tree.directory, GAMMA)
    assert tree.make_tree() == []
    assert not (tree.directory / GAMMA).is_symlink()
    assert refresh(tree.series(), tree.directory) == []


def test_edit_refuses(tree: Sample) -> None:
    with pytest.raises(SeriesError, match="repository's own"):
        edit(tree.directory, "vllm/added/new.py")
    with pytest.raises(SeriesError, match="has no file"):
        edit(tree.directory, "vllm/none.py")
    with pytest.raises(SeriesError, match="no tree"):
        edit(tree.folder / "none", GAMMA)


def test_nothing_to_refresh(tree: Sample) -> None:
    assert refresh_tree(tree) == []


def test_changed_hunk_stays_in_its_patch(tree: Sample) -> None:
    change(tree, ALPHA, "two\n", "TWO\nmore\n")
    assert refresh_tree(tree, ONE) == [f"refreshed patches/{TWO}"]
    assert inserted(tree, TWO, ALPHA) == [(20, ["TWO", "more", "dos"])]
    assert inserted(tree, ONE, ALPHA) == [(2, ["one", "uno"])]


def test_earlier_patch_moves_the_later_one(tree: Sample) -> None:
    change(tree, ALPHA, "uno\n", "uno\ntres\n")
    done = refresh_tree(tree)
    assert done == [f"refreshed patches/{ONE}", f"refreshed patches/{TWO}"]
    assert inserted(tree, ONE, ALPHA) == [(2, ["one", "uno", "tres"])]
    assert inserted(tree, TWO, ALPHA) == [(21, ["two", "dos"])]


def test_new_hunk_goes_to_the_only_patch_of_a_file(tree: Sample) -> None:
    change(tree, BETA, "beta 9\n", "beta 9\nnew\n")
    refresh_tree(tree)
    assert inserted(tree, ONE, BETA) == [(0, ["b"]), (9, ["new"])]


def test_new_hunk_of_a_shared_file_needs_a_name(tree: Sample) -> None:
    change(tree, ALPHA, "alpha 9\n", "alpha 9\nnew\n")
    refused(tree, "say with --patch NAME which patch takes 'new', since several")
    refused(tree, "names no 0009-none.patch", "0009-none.patch")
    refresh_tree(tree, TWO)
    assert inserted(tree, TWO, ALPHA) == [(11, ["new"]), (20, ["two", "dos"])]


def test_two_patches_in_one_place(tree: Sample) -> None:
    change(tree, ALPHA, "uno\n", "uno\nof two\n")
    refresh_tree(tree, TWO)
    assert inserted(tree, ONE, ALPHA) == [(2, ["one", "uno"])]
    assert inserted(tree, TWO, ALPHA) == [(4, ["of two"]), (20, ["two", "dos"])]


def test_file_of_no_patch(tree: Sample) -> None:
    edit(tree.directory, GAMMA)
    change(tree, GAMMA, "    return 1\n", "    early()\n    return 1\n")
    refused(tree, "since none touches")
    refresh_tree(tree, TWO)
    assert inserted(tree, TWO, GAMMA) == [(1, ["early()"])]


def test_editor_that_saves_by_rename(tree: Sample) -> None:
    new = tree.directory / "new"
    new.write_text("def gamma():\n    x()\n    return 1\n")
    new.rename(tree.directory / GAMMA)
    new.write_text("added = 2\n")
    new.rename(tree.directory / "vllm/added/new.py")
    done = refresh_tree(tree, ONE)
    assert "took vllm/added/new.py into the repository" in done
    assert (tree.root / "vllm/added/new.py").read_text() == "added = 2\n"
    assert (tree.directory / "vllm/added/new.py").is_symlink()


def test_module_saved_over_its_link_and_changed_too(tree: Sample) -> None:
    place = tree.directory / "vllm/added/new.py"
    place.unlink()
    place.write_text("added = 2\n")
    tree.write_module("vllm/added/new.py", "added = 3\n")
    refused(tree, "has changed since")


def test_new_patch_starts_as_a_header(tree: Sample) -> None:
    header = "From: A <a@example.org>\nSubject: [PATCH] new\n\nWhy.\n---\n"
    (tree.root / "patches/0003-new.patch").write_text(header)
    tree.list_patches(ONE, TWO, "0003-new.patch")
    findings = verify(tree.series(), Stock(tree.stock), "cpu")
    assert findings == ["0003-new.patch inserts nothing"]
    change(tree, ALPHA, "alpha 30\n", "alpha 30\nthree\n")
    refresh_tree(tree, "0003-new.patch")
    assert inserted(tree, "0003-new.patch", ALPHA) == [(34, ["three"])]


def test_removed_hunk(tree: Sample) -> None:
    change(tree, ALPHA, "one\nuno\n", "")
    refresh_tree(tree)
    assert inserted(tree, ONE, ALPHA) == []
    assert inserted(tree, TWO, ALPHA) == [(18, ["two", "dos"])]


def test_moved_hunk(tree: Sample) -> None:
    # difflib alone would rather move a stock line.
    change(tree, BETA, "b\nbeta 1\n", "beta 1\nb\n")
    refresh_tree(tree)
    assert inserted(tree, ONE, BETA) == [(1, ["b"])]


@pytest.mark.parametrize("new", ["", "beta nine\n", "# beta 9\n"])
def test_stock_lines_stay(tree: Sample, new: str) -> None:
    change(tree, BETA, "beta 9\n", new)
    refused(tree, f"{BETA}: line 9 of the stock file is changed or gone")


def test_new_file_in_the_tree_is_told(tree: Sample) -> None:
    (tree.directory / "vllm/extra.py").write_text("")
    (note,) = refresh_tree(tree)
    assert note.startswith("vllm/extra.py is in the tree alone")


def test_edit_through_a_link_is_found(tree: Sample) -> None:
    stock = Stock(unpacked(tree.wheel()))
    tree.directory = tree.folder / "cached"
    make_tree(tree.series(), stock, "cpu", tree.directory)
    make_tree(tree.series(), stock, "cpu", tree.directory)
    place = tree.directory / GAMMA
    place.chmod(0o644)
    place.write_text("edited\n")
    with pytest.raises(SeriesError, match=f"{GAMMA} was edited through its link"):
        refresh(tree.series(), tree.directory)


def test_path_file(tree: Sample, tmp_path: Path) -> None:
    site = tmp_path / "site"
    (written,) = install_path(tree.directory, site)
    assert written.read_text() == f"{tree.directory}\n"
    (site / "vllm").mkdir()
    with pytest.raises(SeriesError, match="would hide the tree"):
        install_path(tree.directory, site)


def test_commands(tree: Sample) -> None:
    made = tree.run("tree", "--stock", tree.stock)
    assert made.returncode == 0, made.stderr
    directory = tree.root / "build/tree"
    assert made.stdout.startswith(f"export PYTHONPATH={directory} ")
    assert tree.run("edit", f"build/tree/{GAMMA}").returncode == 0
    text = (directory / GAMMA).read_text()
    (directory / GAMMA).write_text("# new\n" + text)
    made = tree.run("tree", "--stock", tree.stock)
    assert f"kept your edit of {GAMMA}" in made.stdout
    refused = tree.run("refresh")
    assert refused.returncode == 1
    assert refused.stderr.startswith(f"error: {GAMMA}: say with --patch NAME")
    done = tree.run("refresh", "--patch", TWO)
    assert done.stdout == f"refreshed patches/{TWO}\n"
    assert tree.run("refresh").stdout == "nothing to refresh\n"
    checked = tree.run("verify", "--stock", tree.stock)
    assert checked.returncode == 0, checked.stderr
    assert checked.stdout.endswith("    6  lines inserted by 2 patches\n")


words = st.lists(st.sampled_from([b"\n", b"a\n", b"b\n", b"c\n"]), max_size=4)


@given(st.data())
def test_assign_keeps_every_line(data: st.DataObject) -> None:
    """Few different lines, so that much could be either stock or inserted."""
    stock = data.draw(st.lists(words, max_size=4).map(lambda x: sum(x, [])))
    composed: list[Line] = []
    edited: list[bytes] = []
    for line in [*stock, None]:
        for owner in (ONE, TWO):
            run = data.draw(st.one_of(st.just([]), words))
            composed += [(owner, one) for one in run]
            edited += data.draw(st.sampled_from([run, run, [], [*run, b"new\n"]]))
        if line is not None:
            composed.append((None, line))
            edited.append(line)
    result = assign("vllm/a.py", composed, edited, "3")
    assert [line for _, line in result] == edited
    assert [line for owner, line in result if owner is None] == stock
    if edited == [line for _, line in composed]:
        assert result == composed


@given(st.data())
def test_assign_refuses_lost_lines(data: st.DataObject) -> None:
    stock = data.draw(words.filter(bool))
    edited = list(stock)
    del edited[data.draw(st.integers(0, len(stock) - 1))]
    composed: list[Line] = [(None, line) for line in stock]
    assert join_lines(composed)
    with pytest.raises(SeriesError, match="changed or gone"):
        assign("vllm/a.py", composed, edited, None)
