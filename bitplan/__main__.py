"""`python -m bitplan` is `bitplan`."""

from bitplan.cli import main

main()
