"""`python -m planner` is `gnnplan`."""

from planner.cli.main import run

if __name__ == "__main__":
    run()
