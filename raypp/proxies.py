"""Which requests go through a proxy that the environment names. Loopback never does."""

import os
from urllib.parse import urlsplit

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
FIX = "name its host in NO_PROXY if this machine reaches it without the proxy"


def is_loopback(url: str) -> bool:
    """Returns whether a URL names this machine by a loopback address, or as localhost."""
    try:
        host = (urlsplit(url).hostname or "").lower()
    except ValueError:
        return False
    return host == "localhost" or host.endswith(".localhost") or host.startswith("127.") or host == "::1"


def proxy_for(url: str) -> str:
    """Describes the proxy that a request to a URL goes through, without its password: `the proxy
    http://squid:3128 (HTTP_PROXY)`. Empty: none."""
    from urllib.request import getproxies, proxy_bypass

    parts = urlsplit(url)
    address = getproxies().get(parts.scheme)
    if not address or is_loopback(url) or proxy_bypass(parts.netloc.rpartition("@")[2]):
        return ""
    scheme, separator, rest = address.rpartition("://")
    name = f"{parts.scheme}_proxy"
    return f"the proxy {scheme}{separator}{rest.rpartition('@')[2]} ({name if name in os.environ else name.upper()})"


def loopback_without_proxy() -> dict[str, str]:
    """Returns variables for processes that serve or use a cluster on loopback: its addresses join
    NO_PROXY, for the libraries that these processes use. Empty if no proxy is set."""
    from urllib.request import getproxies

    if not getproxies():
        return {}
    known = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    names = ",".join([*(name for name in known.split(",") if name.strip()), *_LOOPBACK])
    return {"no_proxy": names, "NO_PROXY": names}
