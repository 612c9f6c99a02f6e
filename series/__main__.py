# SPDX-License-Identifier: Apache-2.0
"""`python -m series`: the tool of those who work on the series."""

import argparse
import sys
from pathlib import Path

from . import tree
from .compose import Series, compose, load
from .errors import SeriesError
from .export import export
from .files import write_all
from .refresh import refresh
from .release import STOCK_NAMES, choose_target
from .stock import Stock, check_target, find_stock, unpacked
from .verify import inserted_lines, verify
from .wheel import build


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    stock = argparse.ArgumentParser(add_help=False)
    stock.add_argument(
        "--stock", type=Path, help="a stock wheel or unpacked wheel to use"
    )
    stock.add_argument(
        "--target", choices=STOCK_NAMES, help="the device that vLLM is for"
    )
    result = argparse.ArgumentParser(prog="python -m series", description=__doc__)
    verbs = result.add_subparsers(dest="verb", required=True, metavar="VERB")

    verb = verbs.add_parser(
        "tree", parents=[stock], help="compose or update the development tree"
    )
    _add_tree(verb)
    verb.add_argument(
        "--force", action="store_true", help="drop edits that refresh did not take"
    )
    place = verb.add_mutually_exclusive_group()
    place.add_argument(
        "--pth", type=Path, metavar="SITE_PACKAGES", help="write a .pth file there"
    )
    place.add_argument(
        "--install", action="store_true", help="use the tree in this interpreter"
    )
    verb.set_defaults(run=_tree)

    verb = verbs.add_parser("edit", help="make a stock file of the tree a copy")
    verb.add_argument("path", help="such as vllm/config/vllm.py")
    verb.add_argument("--tree", dest="directory", type=Path, default=tree.DEFAULT)
    verb.set_defaults(run=_edit)

    verb = verbs.add_parser("refresh", help="turn the tree's edits into patches")
    _add_tree(verb)
    verb.add_argument("--patch", metavar="NAME", help="the patch that takes new lines")
    verb.set_defaults(run=_refresh)

    verb = verbs.add_parser(
        "export", parents=[stock], help="write mails for `git am` on upstream"
    )
    verb.add_argument("directory", type=Path)
    verb.set_defaults(run=_export)

    verb = verbs.add_parser("verify", parents=[stock], help="check the repository")
    verb.set_defaults(run=_verify)

    verb = verbs.add_parser(
        "apply", parents=[stock], help="patch a stock vLLM in place"
    )
    verb.add_argument("directory", type=Path, help="the directory that holds vllm/")
    verb.set_defaults(run=_apply)

    verb = verbs.add_parser("wheel", parents=[stock], help="build the wheel")
    verb.add_argument("-o", "--output", type=Path, default=Path("dist"))
    verb.set_defaults(run=_wheel)
    return result


def _add_tree(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "directory", type=Path, nargs="?", default=tree.DEFAULT, metavar="DIR"
    )


def _stock(arguments: argparse.Namespace) -> tuple[Path, str]:
    """Returns the stock wheel or directory, and the target."""
    if arguments.stock is None:
        target = choose_target(arguments.target)
        return find_stock(target), target
    if not arguments.stock.exists():
        raise SeriesError(f"there is no {arguments.stock}")
    stock = Stock(arguments.stock.resolve())
    target = arguments.target or stock.target() or choose_target()
    check_target(stock, target)
    return stock.location, target


def _tree(series: Series, arguments: argparse.Namespace) -> int:
    location, target = _stock(arguments)
    stock = Stock(location if location.is_dir() else unpacked(location))
    directory = arguments.directory.resolve()
    native = directory.with_name("native")
    for path in tree.make_tree(
        series, stock, target, directory, arguments.force, native
    ):
        print(f"kept your edit of {path}: `refresh` makes it a patch")
    if arguments.pth or arguments.install:
        for written in tree.install_path(directory, arguments.pth):
            print(f"wrote {written}")
    else:
        print(f"export PYTHONPATH={directory} PATH={directory}/bin:$PATH")
    return 0


def _edit(series: Series, arguments: argparse.Namespace) -> int:
    tree.edit(arguments.directory.resolve(), arguments.path)
    return 0


def _refresh(series: Series, arguments: argparse.Namespace) -> int:
    done = refresh(series, arguments.directory.resolve(), arguments.patch)
    print("\n".join(done or ["nothing to refresh"]))
    return 0


def _export(series: Series, arguments: argparse.Namespace) -> int:
    location, target = _stock(arguments)
    for path in export(series, Stock(location), target, arguments.directory):
        print(path)
    return 0


def _verify(series: Series, arguments: argparse.Namespace) -> int:
    location, target = _stock(arguments)
    findings = verify(series, Stock(location), target)
    counts = inserted_lines(series)
    for path, count in sorted(counts.items()):
        print(f"{count:5}  {path}")
    print(f"{counts.total():5}  lines inserted by {len(series.patches)} patches")
    for finding in findings:
        print(f"error: {finding}", file=sys.stderr)
    return 1 if findings else 0


def _apply(series: Series, arguments: argparse.Namespace) -> int:
    arguments.stock = arguments.directory
    location, target = _stock(arguments)
    contents = compose(series, Stock(location), target)
    write_all(location, contents)
    print(f"changed {len(contents)} files in {location}")
    return 0


def _wheel(series: Series, arguments: argparse.Namespace) -> int:
    location, target = _stock(arguments)
    if location.is_dir():
        raise SeriesError("a wheel is built from a stock wheel: --stock names no wheel")
    print(build(series, location, target, arguments.output))
    return 0


def main(words: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    arguments = parser().parse_args(words)
    try:
        status: int = arguments.run(load(), arguments)
    except SeriesError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main())
