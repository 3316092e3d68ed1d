"""Run ``python -m minidp.doctor``, alone or under torchrun."""

from minidp.console import run_command
from minidp.doctor import add_arguments, main

if __name__ == "__main__":
    run_command("python -m minidp.doctor", add_arguments, main)
