"""What runs on a node: it finds its data by its node config and trains when asked."""

from fedbayes.flower import client_app as app

__all__ = ["app"]
