"""Data sets that the package carries: handwritten digits, and heart disease from four hospitals."""

from . import digits, heart  # noqa: F401 - register their sources
