"""The process that the ranks of a trial are forked from: ``python -m tests.chaos.template FD``."""

from tests.chaos import rank
from tests.cluster import template

if __name__ == "__main__":
    template.main(rank.main, ())
