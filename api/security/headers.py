"""Headers that every response carries."""

HEADERS = {
    b"content-security-policy": b"default-src 'none'; frame-ancestors 'none'; base-uri 'none'; "
    b"form-action 'none'",
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"same-origin",  # no-referrer makes browsers send forms' Origin as null
    b"cross-origin-resource-policy": b"same-origin",
    b"x-frame-options": b"DENY",
}
"""A response that sets one of them itself, as a page with a policy of its own, keeps it."""


def with_security(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The headers, with those that are missing."""
    given = {name.lower() for name, _ in headers}
    return [*headers, *((n, v) for n, v in HEADERS.items() if n not in given)]
