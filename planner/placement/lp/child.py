"""The process that solves linear programmes: `python -m planner.placement.lp.child FD`.

It answers one request after the other on a connection it inherits, until that closes.
"""

import pickle
import sys
from multiprocessing.connection import Connection

from planner.placement.lp.solver import Failure, solve


def serve(connection: Connection) -> None:
    """Answer (programme, seconds, solver) with a Point or a Failure."""
    while True:
        try:
            linear, seconds, solver = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            answer: object = solve(linear, seconds=seconds, solver=solver)
        except Exception as error:
            answer = Failure(why=f"{type(error).__name__}: {error}")
        connection.send_bytes(pickle.dumps(answer))


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
