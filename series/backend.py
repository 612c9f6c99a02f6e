# SPDX-License-Identifier: Apache-2.0
"""setuptools' build backend, but for editable installs.

Those are refused at the first question: at the last one, where setuptools builds, pip
would have fetched all requirements already.
"""

from setuptools.build_meta import *  # noqa: F403

from .release import EDITABLE_MESSAGE


def get_requires_for_build_editable(config_settings: object = None) -> list[str]:
    """Refuses."""
    raise SystemExit(f"error: {EDITABLE_MESSAGE}")
