"""Say which minidp this is, also where it is only on the path, not installed."""

__version__ = "0.2.0"  # pyproject.toml reads it from here
