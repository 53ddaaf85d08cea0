"""Train two-tower models, index and serve them, and turn the head/tail dial per request."""

__all__ = ["__version__"]

__version__ = "0.1.0"
