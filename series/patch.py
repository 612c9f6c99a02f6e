# SPDX-License-Identifier: Apache-2.0
"""A patch that only inserts: reading it, writing it, making it.

A patch is a mail (From, Subject, a body that says why, a line `---`) followed by a
zero-context git diff. `git apply --unidiff-zero` takes it. It has no context and no
removed lines, so it holds our text alone; what it applies to is named by blob id.
"""

import hashlib
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from email.parser import HeaderParser

from .errors import SeriesError

# A line of a patched file, and the patch that inserts it (None: the stock file's).
Line = tuple[str | None, bytes]

_DIFF = re.compile(rb"diff --git a/(vllm/[\w./+-]+) b/(vllm/[\w./+-]+)\n")
_INDEX = re.compile(rb"index ([0-9a-f]{40})\.\.([0-9a-f]{40}) (100644|100755)\n")
_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@(.*)\n")


@dataclass(frozen=True)
class Hunk:
    """Lines that go in after line `after` of the old file (0: before the first)."""

    after: int
    lines: tuple[bytes, ...]


@dataclass(frozen=True)
class FilePatch:
    """What one patch inserts into one file."""

    path: str
    old: str
    new: str
    mode: str
    hunks: tuple[Hunk, ...]

    def insert(self, lines: Sequence[Line], owner: str) -> list[Line]:
        """Returns `lines` with the hunks in, marked as `owner`'s."""
        result: list[Line] = []
        done = 0
        for hunk in self.hunks:
            result += lines[done : hunk.after]
            result += [(owner, line) for line in hunk.lines]
            done = hunk.after
        return result + list(lines[done:])


@dataclass(frozen=True)
class Patch:
    """One patch file; `header` is its mail up to and with the line `---`."""

    name: str
    header: bytes
    files: tuple[FilePatch, ...]

    def format(self) -> bytes:
        """Returns the text of the patch file."""
        return self.header + b"".join(
            format_file(file) for file in sorted(self.files, key=lambda f: f.path)
        )

    @property
    def inserted(self) -> int:
        """The number of lines that the patch inserts."""
        return sum(len(hunk.lines) for file in self.files for hunk in file.hunks)


def split_lines(content: bytes) -> list[bytes]:
    """Splits at newlines alone, as git does, and keeps them."""
    return io.BytesIO(content).readlines()


def join_lines(lines: Iterable[Line]) -> bytes:
    """Returns the content of a file given as lines with owners."""
    return b"".join(line for _, line in lines)


def blob_id(content: bytes) -> str:
    """Returns the id that git gives to a file of this content."""
    header = b"blob %d\0" % len(content)
    return hashlib.sha1(header + content, usedforsecurity=False).hexdigest()


def hunks_of(lines: Iterable[Line], owners: Sequence[str]) -> tuple[Hunk, ...]:
    """Returns what the last of `owners` inserts into a file that holds the stock
    lines and those of the other owners; lines of anyone else are left out."""
    hunks: list[Hunk] = []
    before = 0
    run: list[bytes] = []
    for owner, line in lines:
        if owner == owners[-1]:
            run.append(line)
        elif owner is None or owner in owners:
            if run:
                hunks.append(Hunk(before, tuple(run)))
                run = []
            before += 1
    if run:
        hunks.append(Hunk(before, tuple(run)))
    return tuple(hunks)


def format_file(file: FilePatch) -> bytes:
    """Returns the diff of one file, as `git diff --full-index -U0` would print it."""
    text = [
        f"diff --git a/{file.path} b/{file.path}\n"
        f"index {file.old}..{file.new} {file.mode}\n"
        f"--- a/{file.path}\n+++ b/{file.path}\n".encode()
    ]
    shift = 1
    for hunk in file.hunks:
        count = len(hunk.lines)
        length = "" if count == 1 else f",{count}"
        text.append(f"@@ -{hunk.after},0 +{hunk.after + shift}{length} @@\n".encode())
        text += [b"+" + line for line in hunk.lines]
        shift += count
    return b"".join(text)


def parse(name: str, text: bytes) -> Patch:
    """Reads a patch file.

    Raises:
        SeriesError: it is not a patch of this form, or does more than insert; the
            message names the patch and the line.
    """
    return _Parser(name, split_lines(text)).patch()


class _Parser:
    def __init__(self, name: str, lines: list[bytes]) -> None:
        self.name = name
        self.lines = lines
        self.position = 0

    def fail(self, reason: str, position: int | None = None) -> SeriesError:
        number = (self.position if position is None else position) + 1
        return SeriesError(f"{self.name}, line {number}: {reason}")

    def peek(self) -> bytes:
        return self.lines[self.position] if self.position < len(self.lines) else b""

    def expect(self, pattern: re.Pattern[bytes], what: str) -> re.Match[bytes]:
        match = pattern.fullmatch(self.peek())
        if match is None:
            raise self.fail(f"expected {what}")
        self.position += 1
        return match

    def patch(self) -> Patch:
        header = self.header()
        files: dict[str, FilePatch] = {}
        while self.peek():
            start = self.position
            file = self.file()
            if file.path in files:
                raise self.fail(f"{file.path} comes twice in one patch", start)
            files[file.path] = file
        return Patch(self.name, header, tuple(files.values()))

    def header(self) -> bytes:
        while self.peek().rstrip() != b"---":
            if not self.peek() or self.peek().startswith(b"diff --git"):
                raise self.fail("expected a mail header that a line '---' ends")
            self.position += 1
        self.position += 1
        header = b"".join(self.lines[: self.position])
        mail = HeaderParser().parsestr(header.decode(errors="replace"))
        for field in ("From", "Subject"):
            if not mail[field]:
                raise self.fail(f"the mail header has no {field}", 0)
        if not str(mail.get_payload()).replace("---", "").strip():
            raise self.fail("the mail has no body that says why", 0)
        return header

    def file(self) -> FilePatch:
        names = self.expect(
            _DIFF, "a line 'diff --git a/PATH b/PATH' with a PATH under vllm/"
        )
        path = names[1].decode()
        if names[1] != names[2] or ".." in path.split("/"):
            raise self.fail("a patch cannot rename a file", self.position - 1)
        index = self.expect(
            _INDEX, "a line 'index OLD..NEW MODE' with full blob ids (missing or cut)"
        )
        for sign in ("--- a/", "+++ b/"):
            self.expect(re.compile(re.escape(f"{sign}{path}\n").encode()), sign + path)
        hunks: list[Hunk] = []
        while self.peek().startswith(b"@@"):
            hunks.append(self.hunk(hunks))
        if not hunks:
            raise self.fail(f"expected a hunk of {path}")
        old, new, mode = (part.decode() for part in index.groups())
        return FilePatch(path, old, new, mode, tuple(hunks))

    def hunk(self, earlier: list[Hunk]) -> Hunk:
        start = self.position
        match = self.expect(_HUNK, "a hunk header '@@ -N,0 +M,K @@'")
        after, to, count = int(match[1]), int(match[3]), int(match[4] or 1)
        if match[2] is None or int(match[2]) != 0:
            raise self.fail("the hunk replaces lines, and a patch only inserts", start)
        if match[5]:
            # git prints the enclosing function there, which is upstream's text.
            raise self.fail("text after the hunk header's second '@@'", start)
        if earlier and after <= earlier[-1].after:
            raise self.fail("the hunks are not in the order of their lines", start)
        if to != after + 1 + sum(len(hunk.lines) for hunk in earlier) or count == 0:
            raise self.fail("the hunk header's numbers do not add up", start)
        while self.peek()[:1] in (b"+", b"-", b" ", b"\\"):
            if self.peek()[:1] != b"+":
                raise self.fail(
                    {
                        b"-": "a line is removed, and a patch only inserts",
                        b" ": "a context line, and a patch holds no upstream text",
                        b"\\": "inserted text must end with a newline",
                    }[self.peek()[:1]]
                )
            if not self.peek().endswith(b"\n"):
                raise self.fail("the patch is cut off")
            self.position += 1
        lines = self.lines[start + 1 : self.position]
        if len(lines) != count:
            raise self.fail(
                f"the hunk promises {count} lines and has {len(lines)}", start
            )
        return Hunk(after, tuple(line[1:] for line in lines))
