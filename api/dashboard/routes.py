"""Every page of the dashboard."""

from fastapi import FastAPI

from api.dashboard import jobs, login, machines, pages as static, planning, plans, runs


def install(app: FastAPI) -> None:
    """Add the pages to a service; fixed names before those that hold an id."""
    for each in (static, login, planning, plans, machines, jobs, runs):
        app.include_router(each.router)
