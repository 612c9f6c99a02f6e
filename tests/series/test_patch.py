# SPDX-License-Identifier: Apache-2.0
"""The patch format, against git itself."""

import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from series.errors import SeriesError
from series.patch import (
    FilePatch,
    Hunk,
    Line,
    Patch,
    blob_id,
    hunks_of,
    join_lines,
    parse,
    split_lines,
)

HEADER = b"From: A <a@example.org>\nSubject: [PATCH] x\n\nWhy.\n---\n"

lines = st.lists(
    st.binary(max_size=6).map(lambda line: line.replace(b"\n", b"") + b"\n"),
    max_size=12,
)


@st.composite
def files(draw: st.DrawFn) -> tuple[bytes, list[Line]]:
    """A file (its last line perhaps without a newline), and insertions into it."""
    stock = draw(lines)
    result: list[Line] = []
    for line in stock:
        result += [("p", one) for one in draw(st.one_of(st.just([]), lines))]
        result.append((None, line))
    if result and result[-1][0] is None and draw(st.booleans()):
        result[-1] = (None, result[-1][1][:-1] or b"x")
    else:
        result += [("p", one) for one in draw(lines)]
    content = join_lines(line for line in result if line[0] is None)
    return content, result


def make(content: bytes, result: list[Line]) -> Patch:
    old, new = blob_id(content), blob_id(join_lines(result))
    file = FilePatch("vllm/a.py", old, new, "100644", hunks_of(result, ["p"]))
    return Patch("p", HEADER, (file,))


@given(files())
def test_what_is_written_is_read_again(case: tuple[bytes, list[Line]]) -> None:
    content, result = case
    patch = make(content, result)
    if not patch.files[0].hunks:
        return
    assert parse("p", patch.format()) == patch
    stock: list[Line] = [(None, line) for line in split_lines(content)]
    assert patch.files[0].insert(stock, "p") == result


@given(case=files())
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_git_applies_it_to_the_same_content(
    case: tuple[bytes, list[Line]], tmp_path: Path
) -> None:
    content, result = case
    patch = make(content, result)
    if not patch.files[0].hunks:
        return
    (tmp_path / "vllm").mkdir(exist_ok=True)
    place = tmp_path / "vllm" / "a.py"
    place.write_bytes(content)
    command = ["git", "apply", "--unidiff-zero", "--whitespace=nowarn", "-"]
    # Outside any repository, so that git takes the paths as they are.
    environment = {"PATH": "/usr/bin:/bin", "GIT_CEILING_DIRECTORIES": str(tmp_path)}
    subprocess.run(
        command, cwd=tmp_path, env=environment, input=patch.format(), check=True
    )
    assert place.read_bytes() == join_lines(result)


@given(st.binary(max_size=50))
@settings(max_examples=20, deadline=None)
def test_blob_id_is_gits(content: bytes) -> None:
    command = ["git", "hash-object", "--stdin"]
    found = subprocess.run(command, input=content, capture_output=True, check=True)
    assert found.stdout.decode().strip() == blob_id(content)


@given(st.binary(max_size=300))
def test_no_text_does_worse_than_a_plain_error(text: bytes) -> None:
    for candidate in (text, HEADER + text):
        try:
            parse("p", candidate)
        except SeriesError as error:
            assert str(error).startswith("p, line ")


INDEX = f"index {'1' * 40}..{'2' * 40} 100644\n"
FILE = f"diff --git a/vllm/a.py b/vllm/a.py\n{INDEX}--- a/vllm/a.py\n+++ b/vllm/a.py\n"
GOOD = f"{HEADER.decode()}{FILE}@@ -3,0 +4,2 @@\n+one\n+two\n@@ -9,0 +12 @@\n+three\n"


def test_the_good_one_is_good() -> None:
    patch = parse("p", GOOD.encode())
    assert patch.files[0].hunks == (
        Hunk(3, (b"one\n", b"two\n")),
        Hunk(9, (b"three\n",)),
    )
    assert patch.inserted == 3
    assert patch.format() == GOOD.encode()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("+one\n", "-one\n", "removed"),
        ("+one\n", " one\n", "context"),
        ("+one\n", "", "promises 2 lines and has 1"),
        ("+two\n", "+two\n+more\n", "promises 2 lines and has 3"),
        ("+three\n", "+three", "cut off"),
        ("+three\n", "+three\n\\ No newline at end of file\n", "end with a newline"),
        ("@@ -3,0", "@@ -3,1", "replaces lines"),
        ("@@ -3,0", "@@ -3", "replaces lines"),
        ("+4,2 @@", "+4,2 @@ def upstream():", "after the hunk header"),
        ("+4,2", "+5,2", "do not add up"),
        ("@@ -9,0 +12", "@@ -9,0 +10", "do not add up"),
        ("@@ -9,0 +12", "@@ -2,0 +5", "order"),
        ("@@ -9,0 +12", "@@ -3,0 +6", "order"),
        ("@@ -9,0 +12 @@", "@@ nonsense @@", "expected a hunk header"),
        (INDEX, "", "index"),
        (INDEX, "index 1234567..2345678 100644\n", "index"),
        (INDEX, INDEX.replace("100644", "120000"), "index"),
        ("--- a/vllm/a.py\n", "", "expected --- a/"),
        ("+++ b/vllm/a.py\n", "+++ b/vllm/b.py\n", r"expected \+\+\+ b/"),
        ("b/vllm/a.py\nindex", "b/vllm/b.py\nindex", "rename"),
        ("git a/vllm", "git a/tests", "PATH under vllm"),
        ("a/vllm/a.py b/vllm/a.py", "a/vllm/../a.py b/vllm/../a.py", "rename"),
        ("@@ -3,0 +4,2 @@\n+one\n+two\n@@ -9,0 +12 @@\n+three\n", "", "a hunk of"),
        ("+three\n", f"+three\n{FILE}@@ -0,0 +1 @@\n+x\n", "twice"),
        ("+three\n", "+three\n\ntrailing\n", "expected"),
        ("From: ", "Frm: ", "no From"),
        ("Subject: [PATCH] x\n", "", "no Subject"),
        ("Why.\n", "", "why"),
        ("---\ndiff", "diff", "mail header"),
    ],
)
def test_malformed(old: str, new: str, message: str) -> None:
    assert GOOD.count(old) >= 1
    with pytest.raises(SeriesError, match=message) as caught:
        parse("0001-x.patch", GOOD.replace(old, new, 1).encode())
    assert "0001-x.patch, line " in str(caught.value)
