"""Run the command line with `python -m zhixing`."""

from zhixing.cli import main

main()
