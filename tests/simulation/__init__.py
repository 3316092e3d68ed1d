"""Simulated ranks: the real minidp, in one process, in every order of events, by seed."""
