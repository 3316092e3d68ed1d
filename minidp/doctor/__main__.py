"""``python -m minidp.doctor``, also by torchrun."""

import argparse
import sys

from minidp._console import parse
from minidp.doctor import add_arguments, main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m minidp.doctor")
    add_arguments(parser)
    sys.exit(main(parse(parser)))
