# SPDX-License-Identifier: Apache-2.0
"""The series as mails with full context, for `git am` on an upstream checkout.

The mails hold upstream's lines as context, so they are written where the user says and
never committed. git itself makes them, from a repository of the touched files alone.
"""

import os
import re
import subprocess
import tempfile
from email import message_from_bytes, policy
from pathlib import Path

from .compose import Series, compose, patched_lines
from .errors import SeriesError
from .files import write_all
from .patch import Patch, join_lines
from .release import UPSTREAM_RELEASE
from .stock import Stock

MODULES_MESSAGE = """hidden states: modules

The modules that the patches of this series call.
"""
DEFAULT_AUTHOR = "vLLM hidden states <hidden-states@localhost>"
# Where a patch's mail has no Date: the same series shall give the same mails.
DEFAULT_DATE = "Thu, 1 Jan 2026 00:00:00 +0000"


def export(series: Series, stock: Stock, target: str, output: Path) -> list[Path]:
    """Writes the series into `output`, one mail a file, and returns the files."""
    compose(series, stock, target)  # says what is wrong before anything is written
    output.mkdir(parents=True, exist_ok=True)
    if any(output.iterdir()):
        raise SeriesError(f"{output} is not empty: name an empty directory")
    touched = {
        path: content
        for path in {*series.modules, *series.patched()}
        if (content := stock.read(path)) is not None
    }
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder)
        _git(repository, "init", "--quiet")
        write_all(repository, touched)
        _commit(repository, f"vLLM {UPSTREAM_RELEASE}", DEFAULT_AUTHOR, DEFAULT_DATE)
        if series.modules:
            modules = {p: file.read_bytes() for p, file in series.modules.items()}
            write_all(repository, modules)
            author = DEFAULT_AUTHOR
            if series.patches:
                author = _mail(series.patches[0])[1]
            _commit(repository, MODULES_MESSAGE, author, DEFAULT_DATE)
        for number, patch in enumerate(series.patches):
            names = {one.name for one in series.patches[: number + 1]}
            contents = {}
            for path in [file.path for file in patch.files]:
                lines = patched_lines(series, path, touched[path])
                contents[path] = join_lines(
                    line for line in lines if line[0] is None or line[0] in names
                )
            write_all(repository, contents)
            _commit(repository, *_mail(patch))
        root = _git(repository, "rev-list", "--max-parents=0", "HEAD").strip()
        # --zero-commit and no signature: the same series gives the same mails.
        options = ["--quiet", "--full-index", "--zero-commit", "--no-signature"]
        options += ["--no-renames", "--binary", "-o", str(output.resolve())]
        _git(repository, "format-patch", *options, f"{root}..HEAD")
    return sorted(output.iterdir())


def _mail(patch: Patch) -> tuple[str, str, str]:
    """Returns a patch's commit message, author and date."""
    mail = message_from_bytes(patch.header, policy=policy.default)
    subject = re.sub(r"^\s*\[PATCH[^]]*\]\s*", "", mail["Subject"])
    body = patch.header.partition(b"\n\n")[2].decode().rstrip().removesuffix("---")
    return f"{subject}\n\n{body}", mail["From"], mail["Date"] or DEFAULT_DATE


def _commit(repository: Path, message: str, author: str, date: str) -> None:
    _git(repository, "add", "--all", "--force")
    options = ["--quiet", "--allow-empty", f"--author={author}", f"--date={date}"]
    _git(repository, "commit", *options, "-m", message)


def _git(repository: Path, *arguments: str) -> str:
    # Of the user's own settings none shall change what comes out.
    environment = os.environ | {
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_SYSTEM": os.devnull,
        "GIT_COMMITTER_NAME": "series",
        "GIT_COMMITTER_EMAIL": "series@localhost",
    }
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        environment.pop(name, None)
    try:
        return subprocess.run(
            ["git", *arguments],
            cwd=repository,
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
    except FileNotFoundError as error:
        raise SeriesError("export needs git, which is not installed") from error
    except subprocess.CalledProcessError as error:
        raise SeriesError(f"git failed: {error.stderr.strip()}") from error
