"""Documents of plans are read once, and gone when their plan is."""

from gnnplan.api.service.context import Documents


def test_a_document_is_made_once_until_it_is_forgotten():
    kept, made = Documents(), list[str]()

    def make() -> bytes:
        made.append("x")
        return b"x"

    assert [kept.get_or_make("p/plan", make) for _ in range(3)] == [b"x"] * 3
    assert len(made) == 1
    kept.forget("p/")
    assert kept.get("p/plan") is None


def test_a_plan_that_is_removed_while_it_is_read_is_not_kept():
    kept = Documents()

    def make() -> bytes:
        kept.forget("p/")  # what another thread does meanwhile
        return b"x"

    assert kept.get_or_make("p/plan", make) == b"x"
    assert kept.get("p/plan") is None


def test_no_more_is_kept_than_it_may():
    kept = Documents(most_bytes=10)
    for name in ("a", "b", "c"):
        kept.get_or_make(name, lambda: b"12345")
    assert [kept.get(name) is not None for name in ("a", "b", "c")] == [False, True, True]
