"""One form for the address of an OpenAI-compatible server, whatever form a person typed."""

from __future__ import annotations

import os
from urllib.parse import urlsplit, urlunsplit

from labkit.errors import LabError


class BadUrl(LabError):
    """An address that no server can have."""


def base_url(url: str) -> str:
    """The address ending in one `/v1`, from host:port with or without scheme, slash or `/v1`.

    A path before `/v1` (a gateway's) is kept. Raises BadUrl for anything that is no http address.
    """
    text = url.strip()
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        _ = parts.port
    except ValueError as error:
        raise BadUrl(f"{url!r} is no http address ({error})", "give it as http://host:port") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise BadUrl(f"{url!r} is no http address", "give it as http://host:port")
    path = parts.path.rstrip("/")
    while path.endswith("/v1"):
        path = path[: -len("/v1")].rstrip("/")
    return urlunsplit((parts.scheme, parts.netloc, f"{path}/v1", "", ""))


def headers() -> dict[str, str]:
    """The key that LABKIT_API_KEY holds, as a request's header; it never gets into results."""
    key = os.environ.get("LABKIT_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


def root_url(url: str) -> str:
    """The address without `/v1`, where /health, /metrics and /start_profile are."""
    return base_url(url)[: -len("/v1")]
