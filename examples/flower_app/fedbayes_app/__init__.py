"""A thin Flower app; everything is in ``fedbayes.flower``."""
