"""Sinks: handlers that write packets somewhere."""
