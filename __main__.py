"""``python -m tunery``: the command line, for launchers such as ``torchrun -m tunery``."""

from .core.commands import main

main()
