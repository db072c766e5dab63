"""``python -m xorl_lab.cli``: the command where the script is not on the path."""

from xorl_lab.cli import main

main()
