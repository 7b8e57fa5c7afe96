"""`python -m gnnplan.planner` is `gnnplan`."""

from gnnplan.planner.cli.main import run

if __name__ == "__main__":
    run()
