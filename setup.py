# SPDX-License-Identifier: Apache-2.0
"""Builds the wheel with setuptools' commands; all the work is done by `series`."""

import shutil
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.dist_info import dist_info
from setuptools.command.editable_wheel import editable_wheel
from setuptools.command.egg_info import egg_info
from setuptools.command.sdist import sdist
from setuptools.errors import BaseError

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from series.compose import load  # noqa: E402
from series.errors import SeriesError  # noqa: E402
from series.release import EDITABLE_MESSAGE, choose_target, version  # noqa: E402
from series.stock import Stock, find_stock  # noqa: E402
from series.wheel import build, write_dist_info  # noqa: E402


class BuildWheel(bdist_wheel):
    def run(self):
        target = choose_target()
        wheel = build(load(ROOT), find_stock(target), target, Path(self.dist_dir))
        self.distribution.dist_files.append(("bdist_wheel", "", str(wheel)))


class WriteMetadata(dist_info):
    """What pip asks for before it builds: the very metadata of the wheel."""

    def run(self):
        target = choose_target()
        output = Path(self.output_dir)
        write_dist_info(load(ROOT), Stock(find_stock(target)), target, output)
        # setuptools looks for one beside the answer.
        (output / "vllm.egg-info").mkdir(exist_ok=True)


class RefuseEditable(editable_wheel):
    def run(self):
        raise BaseError(EDITABLE_MESSAGE)


class NoEggInfo(egg_info):
    """setuptools asks for it before every build; only an sdist needs it."""

    def run(self):
        if "sdist" in self.distribution.commands:
            super().run()


class BuildSource(sdist):
    def run(self):
        super().run()
        shutil.rmtree(self.get_finalized_command("egg_info").egg_info)


try:
    setup(
        version=version(choose_target()),
        cmdclass={
            "bdist_wheel": BuildWheel,
            "dist_info": WriteMetadata,
            "editable_wheel": RefuseEditable,
            "egg_info": NoEggInfo,
            "sdist": BuildSource,
        },
    )
except SeriesError as error:
    sys.exit(f"error: {error}")
