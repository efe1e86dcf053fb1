"""One form for the address of an OpenAI-compatible server, whatever form a person typed."""

from __future__ import annotations

import functools
import os
import re
import ssl
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import httpx

from labkit.engine import bounds
from labkit.errors import LabError

# What stands behind a path of one's own: any number of /v1, and the endpoint where a whole one was pasted.
ENDPOINT = re.compile(r"(/+v1)+(/+chat/+completions|/+completions|/+models)?$")


class BadUrl(LabError):
    """An address that no server can have."""


class BadKey(LabError):
    """A key that no header can carry; the key itself is never shown."""


def base_url(url: str) -> str:
    """The address ending in one `/v1`, from host:port with or without scheme, slash, `/v1` or endpoint.

    A path before `/v1` (a gateway's) is kept. Raises BadUrl for anything that is no http address.
    """
    text = url.strip() if "://" in url else f"http://{url.strip()}"
    if "@" in re.split("[/?#]", text.partition("://")[2])[0]:  # results and errors would hold it
        raise BadUrl(
            "the address of a server holds a user's name or a password",
            "put the key into the environment variable LABKIT_API_KEY and leave it out of the address",
        )
    try:
        parts = urlsplit(text)
        _ = parts.port, httpx.URL(text)
    except (ValueError, httpx.InvalidURL) as error:
        raise BadUrl(f"{url!r} is no http address ({error})", "give it as http://host:port") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise BadUrl(f"{url!r} is no http address", "give it as http://host:port")
    path = ENDPOINT.sub("", parts.path.rstrip("/"))
    return urlunsplit((parts.scheme, parts.netloc, f"{path}/v1", "", ""))


def headers() -> dict[str, str]:
    """The key that LABKIT_API_KEY holds, as a request's header; it never gets into results. Raises BadKey."""
    key = os.environ.get("LABKIT_API_KEY", "").strip()  # a key read from a file brings its line's end
    if not (key.isascii() and key.isprintable()):
        raise BadKey(
            "LABKIT_API_KEY holds characters that no header may have", "set it to the key alone, one line of ASCII"
        )
    return {"Authorization": f"Bearer {key}"} if key else {}


def local(url: str) -> bool:
    """Whether the address is this machine's: no proxy of the environment is asked then."""
    return urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")


def get(url: str, timeout: float = 10) -> httpx.Response:
    """A page of a server, asked for as the benchmark asks: with its key, and past any proxy where it is local.

    Redirects are not followed: they could lead the key to another host. Raises TooMuch for an endless page.
    """
    with httpx.Client(timeout=timeout, **options(url), event_hooks=bounds.HOOKS) as client:
        return client.get(url)


def post(url: str, body: dict[str, Any], timeout: float) -> dict[str, Any]:
    """The object that a server answers to one request, sent as `get` asks. Raises httpx.HTTPError, NoAnswer."""
    with httpx.Client(timeout=timeout, **options(url), event_hooks=bounds.HOOKS) as client:
        return bounds.object_of(client.post(url, json=body).raise_for_status())


def options(url: str) -> dict[str, Any]:
    """What a client of this server is made with: the key, answers as they are, no proxy to this very machine."""
    trust_env = not local(url)
    return {"headers": headers() | bounds.PLAIN, "trust_env": trust_env, "verify": trusted(trust_env)}


@functools.cache
def trusted(trust_env: bool) -> ssl.SSLContext:
    """The certificates that a client trusts. Reading them takes 45 ms, far longer than a request on loopback."""
    return httpx.create_ssl_context(trust_env=trust_env)


def root_url(url: str) -> str:
    """The address without `/v1`, where /health, /metrics and /start_profile are."""
    return base_url(url)[: -len("/v1")]
