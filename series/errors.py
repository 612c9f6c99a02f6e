# SPDX-License-Identifier: Apache-2.0
"""The one error that this package raises on purpose."""


class SeriesError(Exception):
    """Something the user can act on; its text is one plain sentence."""
