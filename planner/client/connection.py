"""Send requests to one service: its key, timeouts, retries, and checks of its answers.

A request is repeated only where that is safe: reads always, and POSTs because each carries an
Idempotency-Key of its own, which all its tries share.

GnnplanError (runtime.errors)
  ServiceProblemError         the service refused: the RFC 9457 problem document, typed
    RequestRefusedError       the request is wrong (also an InputError, exit code 2)
    PlanRefusedError          no feasible plan (also a PlanDoesNotFit, exit code 3)
    BudgetRefusedError        a memory budget would be passed (also a BudgetExceeded)
  ServiceUnreachableError     no service answers there, or it is another one
  JobCancelledError           the job was cancelled before it had a result
"""

import random
import time
import uuid
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import httpx2

from gnnplan.planner.errors import PlanDoesNotFit, SettingsError
from gnnplan.runtime.comm.route import is_loopback
from gnnplan.runtime.errors import BudgetExceeded, GnnplanError, InputError

KEY_VARIABLE = "GNNPLAN_API_KEY"
_MEMBERS = ("type", "title", "status", "detail", "instance")


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """RFC 9457 problem details."""

    type: str
    title: str
    status: int
    detail: str
    instance: str
    extensions: dict[str, Any] = field(default_factory=dict[str, Any])
    """Members that the type adds, such as constraint and needed_bytes."""

    @staticmethod
    def of(document: dict[str, Any], status: int = 500) -> "Problem":
        """Read a problem document; missing or malformed members get defaults."""
        texts = {name: str(document.get(name) or "") for name in _MEMBERS}
        given = document.get("status")
        return Problem(
            type=texts["type"] or "about:blank",
            title=texts["title"],
            status=given if isinstance(given, int) else status,
            detail=texts["detail"],
            instance=texts["instance"],
            extensions={k: v for k, v in document.items() if k not in _MEMBERS and v is not None},
        )

    @property
    def text(self) -> str:
        """Return the problem in one line."""
        said = " ".join((self.detail or self.title or f"status {self.status}").split())
        if self.status == 401:
            return f"{said}; the key is taken from ${KEY_VARIABLE}"
        return said


class ServiceProblemError(GnnplanError):
    """The service refused a request, or a job failed; `problem` is its reason."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.text)
        self.problem = problem


class RequestRefusedError(ServiceProblemError, InputError):
    """The request is wrong: it names something missing or forbidden, or contradicts itself."""


class PlanRefusedError(ServiceProblemError, PlanDoesNotFit):
    """No plan is feasible; the text is the sum that fails."""

    def __init__(self, problem: Problem) -> None:
        more = problem.extensions
        PlanDoesNotFit.__init__(
            self,
            problem.detail or problem.title,
            constraint=str(more.get("constraint", "")),
            needed_bytes=more.get("needed_bytes"),
            available_bytes=more.get("available_bytes"),
        )
        self.problem = problem


class BudgetRefusedError(ServiceProblemError, BudgetExceeded):
    """A memory budget would be passed."""


class ServiceUnreachableError(GnnplanError):
    """No gnnplan service answers at the address."""


class JobCancelledError(GnnplanError):
    """The job was cancelled and has no result."""


_BY_TYPE: dict[str, type[ServiceProblemError]] = {
    "plan-does-not-fit": PlanRefusedError,
    "budget-exceeded": BudgetRefusedError,
}
_WAIT = (408, 425, 429)
"""Statuses of refusals that are not the request's fault."""


def error_of(problem: Problem) -> ServiceProblemError:
    """Return the exception of a problem."""
    kind = _BY_TYPE.get(problem.type)
    if kind is None:
        wrong = 400 <= problem.status < 500 and problem.status not in _WAIT
        kind = RequestRefusedError if wrong else ServiceProblemError
    return kind(problem)


TRIES = 4
FIRST_WAIT_SECONDS = 0.25
LONGEST_WAIT_SECONDS = 30.0
TIMEOUT = httpx2.Timeout(60.0, connect=10.0)
AGAIN = (429, 502, 503, 504)


class Connection:
    """HTTP connections to one service, which several threads may share.

    Args:
        url: of the service, such as http://127.0.0.1:8000.
        key: API key, if one is needed.
        timeout: of each request.
        http: client to use in place of a new one.

    Raises:
        SettingsError: the URL is not http or https, or no header can hold the key.
    """

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        timeout: httpx2.Timeout = TIMEOUT,
        http: httpx2.Client | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self.timeout = timeout
        if key is not None and not (key.isascii() and key.isprintable()):
            raise SettingsError(f"{KEY_VARIABLE}: expected a key of printable ASCII characters")
        self._headers = {"User-Agent": "gnnplan-client"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._http = http or _http(self.url, timeout)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def get(self, path: str, params: Mapping[str, Any] | None = None) -> Any:
        """Read a JSON document.

        Raises:
            ServiceProblemError: the service refuses.
            ServiceUnreachableError: no gnnplan service answers.
        """
        return self._json(self.ask("GET", path, params=params))

    def get_bytes(self, path: str) -> bytes:
        """Read a document's bytes; raises as `get`."""
        return self.ask("GET", path).content

    def post(self, path: str, body: Any = None, *, idempotency_key: str | None = None) -> Any:
        """Send a POST and return its JSON answer; raises as `get`.

        Args:
            path: of the resource.
            body: JSON; None: no body.
            idempotency_key: makes repeated calls one; None: this call alone.
        """
        key = idempotency_key or uuid.uuid4().hex
        return self._json(self.ask("POST", path, body=body, headers={"Idempotency-Key": key}))

    def delete(self, path: str, params: Mapping[str, Any] | None = None) -> None:
        """Remove a resource; raises as `get`."""
        self.ask("DELETE", path, params=params)

    def ask(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> httpx2.Response:
        """Send a request, and repeat it where the service is away or busy; raises as `get`."""
        wait = FIRST_WAIT_SECONDS
        for tries_left in reversed(range(TRIES)):
            try:
                answer = self._http.request(
                    method,
                    self.url + path,
                    params=_drop_none(params),
                    json=body,
                    headers={**self._headers, **(headers or {})},
                )
            except httpx2.TransportError as error:
                if not tries_left:
                    raise self.unreachable(error) from None
                time.sleep(wait * (0.5 + random.random()))
            else:
                after = wait_of(answer, wait)
                if answer.status_code not in AGAIN or not tries_left or after is None:
                    return self._refuse_failure(answer)
                time.sleep(after)
            wait *= 2
        raise AssertionError("the last try returns or raises")

    def save(self, path: str, target: Path) -> None:
        """Write a document to a file as it arrives; start again where the connection breaks.

        Raises:
            ServiceProblemError: the service refuses.
            ServiceUnreachableError: it does not answer.
            OSError: the file cannot be written.
        """
        wait = FIRST_WAIT_SECONDS
        for tries_left in reversed(range(TRIES)):
            try:
                with self.stream(path, read_seconds=60.0) as answer, target.open("wb") as file:
                    for chunk in answer.iter_bytes():
                        file.write(chunk)
                return
            except httpx2.TransportError as error:
                if not tries_left:
                    raise self.unreachable(error) from None
                time.sleep(wait)
                wait *= 2

    @contextmanager
    def stream(
        self, path: str, *, headers: Mapping[str, str] | None = None, read_seconds: float | None
    ) -> Generator[httpx2.Response]:
        """Open an answer that is read as it arrives; the request is sent once.

        Raises:
            ServiceProblemError: the service refuses.
            httpx2.TransportError: the connection fails, at once or later.
        """
        timeout = httpx2.Timeout(60.0, connect=10.0, read=read_seconds)
        with self._http.stream(
            "GET", self.url + path, headers={**self._headers, **(headers or {})}, timeout=timeout
        ) as answer:
            if answer.status_code >= 400:
                answer.read()
                self._refuse_failure(answer)
            yield answer

    def unreachable(self, error: Exception) -> ServiceUnreachableError:
        """Return the error to raise where nobody answers."""
        why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return ServiceUnreachableError(
            f"{self.url}: expected a gnnplan service, found none ({why}); start gnnplan-serve or "
            "correct the address"
        )

    def _refuse_failure(self, answer: httpx2.Response) -> httpx2.Response:
        if answer.is_success:
            return answer
        raise _refusal(self.url, answer)

    def _json(self, answer: httpx2.Response) -> Any:
        kind = answer.headers.get("content-type", "no content type").partition(";")[0]
        if kind != "application/json":
            raise _other_service(self.url, answer, kind)
        try:
            return answer.json()
        except ValueError:
            raise _other_service(self.url, answer, "damaged JSON") from None


def wait_of(answer: httpx2.Response, otherwise: float) -> float | None:
    """Return the seconds until a busy service is asked again; None if that is too long."""
    text = answer.headers.get("retry-after", "")
    seconds = float(text) if text.isascii() and text.isdigit() else otherwise
    return seconds if seconds <= LONGEST_WAIT_SECONDS else None


def _refusal(url: str, answer: httpx2.Response) -> ServiceProblemError | ServiceUnreachableError:
    kind = answer.headers.get("content-type", "").partition(";")[0]
    try:
        document: Any = answer.json() if kind.endswith("json") else None
    except ValueError:
        document = None
    if kind == "application/problem+json" and isinstance(document, dict):
        found = cast(dict[str, Any], document)
        return error_of(Problem.of(found, answer.status_code))
    return _other_service(url, answer, kind or "no content type")


def _other_service(url: str, answer: httpx2.Response, found: str) -> ServiceUnreachableError:
    return ServiceUnreachableError(
        f"{url}: expected the answer of a gnnplan service, found {found} with status "
        f"{answer.status_code}; is this its address?"
    )


def _drop_none(params: Mapping[str, Any] | None) -> dict[str, Any]:
    return {name: value for name, value in (params or {}).items() if value is not None}


def _http(url: str, timeout: httpx2.Timeout) -> httpx2.Client:
    try:
        parsed = httpx2.URL(url)
    except httpx2.InvalidURL:
        parsed = httpx2.URL()
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise SettingsError(f"expected an address such as http://127.0.0.1:8000, found {url!r}")
    if parsed.userinfo:
        raise SettingsError(f"expected an address without a password; set ${KEY_VARIABLE} instead")
    # Redirects are not followed: the key goes to nobody but the address that was given.
    return httpx2.Client(
        timeout=timeout, follow_redirects=False, trust_env=not is_loopback(parsed.host)
    )
