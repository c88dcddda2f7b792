"""What runs at the server: the round loop of ``fedbayes run``, over Flower's nodes."""

from fedbayes.flower import server_app as app

__all__ = ["app"]
