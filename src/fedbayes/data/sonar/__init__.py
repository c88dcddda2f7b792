"""Passive sonar: recordings, their pictures, splits that keep recordings whole, and a synthetic sea."""

from .augment import SonarPictures, SonarWaveforms
from .extraction import Features, extract
from .layouts import LAYOUTS, catalogue
from .pictures import Picture, make_picture
from .pooling import Pooled, confusion, pool
from .recordings import Recording, Skipped, audio_files, read, stream
from .sea import Heard, Hydrophone, Passage, Site, hear, hear_all, plan, write_sea
from .sources import NarrowRecordings, SkippedRecordings, read_recordings, read_site
from .splits import SameSound, check_clients, check_disjoint
from .vessels import CLASSES, Vessel, VesselClass

__all__ = [
    "CLASSES",
    "LAYOUTS",
    "Features",
    "Heard",
    "Hydrophone",
    "NarrowRecordings",
    "Passage",
    "Picture",
    "Pooled",
    "Recording",
    "SameSound",
    "Site",
    "Skipped",
    "SkippedRecordings",
    "SonarPictures",
    "SonarWaveforms",
    "Vessel",
    "VesselClass",
    "audio_files",
    "catalogue",
    "check_clients",
    "check_disjoint",
    "confusion",
    "extract",
    "hear",
    "hear_all",
    "make_picture",
    "plan",
    "pool",
    "read",
    "read_recordings",
    "read_site",
    "stream",
    "write_sea",
]
