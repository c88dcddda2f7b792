"""Data sets that the package carries: handwritten digits, and heart disease from four hospitals."""

from . import digits  # noqa: F401 - registers its source
