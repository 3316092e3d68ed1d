"""Tests of minidp.torchft: they need the extra of this name, and skip without it."""
