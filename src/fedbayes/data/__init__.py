"""Data: sources, partitions, splits, and transforms on the device."""

from .examples import Dataset, Examples
from .loading import load, load_source
from .matching import match
from .partition import partition, register_scheme
from .sources import Remote, Request, Source, data_directory, get_source, register_source, sources
from .splits import hold_out, split_validation
from .transform import Augmentation, Transform, make_transform, register_augmentation

__all__ = [
    "Augmentation",
    "Dataset",
    "Examples",
    "Remote",
    "Request",
    "Source",
    "Transform",
    "data_directory",
    "get_source",
    "hold_out",
    "load",
    "load_source",
    "make_transform",
    "match",
    "partition",
    "register_augmentation",
    "register_scheme",
    "register_source",
    "sources",
    "split_validation",
]
