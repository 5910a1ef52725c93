"""Handlers: what consumers run over packets. `from engine.handlers import Handler` for one of your own."""

from engine.handlers.api import Handler

__all__ = ["Handler"]
