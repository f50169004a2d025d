"""The command line. It knows public names only, and nothing heavy is imported before a command needs it."""

from perdure.cli.app import app, main

__all__ = ["app", "main"]
