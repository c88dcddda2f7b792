"""Data: sources, partitions, splits, and transforms on the device."""

from .arrays import from_arrays
from .examples import Dataset, Examples
from .fetch import FileCheck, SourceRow, check, describe_sources, fetch, render_checks, render_sources
from .holdings import Holding, partition_record, render, table
from .loading import load, load_inputs, load_source
from .matching import match
from .partition import client_names, partition, register_scheme
from .sources import Remote, Request, Source, data_directory, get_source, register_source, sources
from .splits import hold_out, split_validation
from .transform import Augmentation, Transform, make_transform, register_augmentation, side_by_side

__all__ = [
    "Augmentation",
    "Dataset",
    "Examples",
    "FileCheck",
    "Holding",
    "Remote",
    "Request",
    "Source",
    "SourceRow",
    "Transform",
    "check",
    "client_names",
    "data_directory",
    "describe_sources",
    "fetch",
    "from_arrays",
    "get_source",
    "hold_out",
    "load",
    "load_inputs",
    "load_source",
    "make_transform",
    "match",
    "partition",
    "partition_record",
    "register_augmentation",
    "register_scheme",
    "register_source",
    "render",
    "render_checks",
    "render_sources",
    "side_by_side",
    "sources",
    "split_validation",
    "table",
]
