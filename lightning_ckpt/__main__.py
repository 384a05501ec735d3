"""The command line, by the interpreter at hand: `python -m lightning_ckpt` for `lightning-ckpt`."""

import sys

from lightning_ckpt.cli import main

sys.exit(main())
