"""The version of sdopt, and where it lies. Imports nothing."""

from pathlib import Path

__version__ = "0.1.0"

PACKAGE = Path(__file__).parent
"""The folder of the package."""

CHECKOUT = PACKAGE.parent
"""The folder of a checkout; of an installed wheel, `site-packages`."""
