"""Run ``minidp run`` as ``python -m minidp.run``, which torchrun can start."""

from minidp.console import run_command

from . import add_arguments, main

if __name__ == "__main__":
    run_command("minidp run", add_arguments, main)
