"""Where a judge is, and the key to it: what is accepted, and what may be shown of it."""

import ipaddress
import os
from urllib.parse import SplitResult, urlsplit

from expertflow.core.errors import ConfigError


def shown(endpoint: str) -> str:
    """Give an address as it may be recorded: without user, query and fragment."""
    address = endpoint.partition("?")[0].partition("#")[0]
    scheme, found, rest = address.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{found}{host.rpartition('@')[2]}{slash}{path}".rstrip("/")


def checked_address(endpoint: str) -> SplitResult:
    """Split an address of scheme, host and path.

    Raises:
        ConfigError: it is another; never repeats what may hold a secret.
    """
    try:
        address = urlsplit(endpoint)
        port = address.port
    except ValueError:
        address, port = urlsplit(""), 0
    if address.scheme not in ("http", "https") or not address.hostname or port == 0:
        raise ConfigError("evaluation.judge.endpoint is no address; write https://host/v1")
    if "@" in address.netloc or address.query or address.fragment:
        # Not repeated: it may hold a secret.
        raise ConfigError(
            "evaluation.judge.endpoint holds a user, query or fragment; "
            "give scheme, host and path, and the key by api_key_env"
        )
    if any(ord(char) <= 32 or ord(char) > 126 for char in endpoint):
        raise ConfigError("evaluation.judge.endpoint holds a blank or no ASCII; write it encoded")
    return address


def read_key(name: str | None) -> str | None:
    """Read the key from the environment variable of that name.

    Raises:
        ConfigError: it is not there, or no header could hold it; never repeats it.
    """
    if name is None:
        return None
    key = os.environ.get(name, "").strip()
    if not key:
        raise ConfigError(f"the environment variable {name} is not set; it should hold the key")
    if any(ord(char) <= 32 or ord(char) > 126 for char in key):
        raise ConfigError(f"the environment variable {name} holds what no key can; set it again")
    return key


def is_this_machine(address: SplitResult) -> bool:
    """Say whether what is sent there leaves this machine."""
    if address.hostname == "localhost":
        return True
    try:
        return ipaddress.ip_address(address.hostname or "").is_loopback
    except ValueError:
        return False
