"""``python -m ckptd`` is ``ckptd``."""

from ckptd.cli import main

main()
