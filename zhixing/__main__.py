"""`python -m zhixing` is the command line."""

from zhixing.cli import main

main()
