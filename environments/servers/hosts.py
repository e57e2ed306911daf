"""Which hosts and addresses may be read, so that no page leads into the network that the run is in.

A URL is checked as text, by name and port, and every address of its host where the connection is made
(:mod:`environments.servers.transport`): a name says nothing about where it leads.

Refused are all addresses that are not public (IANA's special-purpose registries, RFC 6890): loopback, private,
link-local with the metadata services of clouds, carrier NAT, multicast, reserved, and every IPv6 address that carries
an IPv4 address (mapped, compatible, NAT64, 6to4, Teredo). ``allow_private`` opens private ones for a host and port;
link-local, multicast and unspecified ones stay closed.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address

import httpx

from environments.servers.page_text import PageError
from environments.servers.web_settings import PagesConfig, host_and_port
from mua.utils.strict_json import broken_at, printable

LONGEST_URL = 4000
_PORTS = {"http": 80, "https": 443}
_NAME = re.compile(r"[a-z0-9_](?:[a-z0-9_.-]*[a-z0-9_])?")
_NUMERIC = re.compile(r"(?:0[xX][0-9a-fA-F]*|[0-9]+)")
_CLOSED = [
    ipaddress.ip_network(one)
    for one in (
        "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24",
        "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24",
        "224.0.0.0/4", "240.0.0.0/4", "2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20",
    )
]  # fmt: skip
"""Written down, because what ``ipaddress`` calls global differs between releases of Python."""
_UNICAST = ipaddress.IPv6Network("2000::/3")
"""All of IPv6 that is given out for the public internet."""


def is_public(address: IPv4Address | IPv6Address) -> bool:
    """Whether an address belongs to a host of the public internet."""
    if isinstance(address, IPv6Address) and (address.scope_id is not None or address not in _UNICAST):
        return False
    return not any(address in network for network in _CLOSED if network.version == address.version)


def never_read(address: IPv4Address | IPv6Address) -> bool:
    """Whether no configuration opens it."""
    inner = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    found = inner or address
    return found.is_link_local or found.is_multicast or found.is_unspecified


@dataclass(frozen=True, slots=True)
class AllowedUrl:
    """A URL that may be asked, as far as its text goes."""

    url: httpx.URL
    host: str
    """Lower case, IDNA, without the dot of the root."""
    port: int


class HostRules:
    """``allow``, ``block`` and ``allow_private``."""

    def __init__(self, config: PagesConfig) -> None:
        self._allow = [host_and_port(entry) for entry in config.allow]
        self._block = [host_and_port(entry) for entry in config.block]
        self._private = {host_and_port(entry) for entry in config.allow_private}

    def target(self, url: str | httpx.URL) -> AllowedUrl:
        """What ``url`` asks for, its fragment left out. Raises :class:`PageError`."""
        if len(str(url)) > LONGEST_URL:
            raise PageError(f"refused: the url is longer than {LONGEST_URL} characters")
        try:
            parsed = httpx.URL(url) if broken_at(str(url)) is None else None
        except (httpx.InvalidURL, ValueError):
            parsed = None
        if parsed is None:
            raise PageError("refused: this is no url")
        if parsed.scheme not in _PORTS:
            raise PageError("refused: the url must begin with http:// or https://")
        if parsed.userinfo:
            raise PageError("refused: the url has a user name in it")
        host = parsed.raw_host.decode("ascii").lower().removesuffix(".")
        port = _PORTS[parsed.scheme] if parsed.port is None else parsed.port
        if not 0 < port < 65_536:
            raise PageError("refused: the url has no port that there is")
        self._check_name(host, port)
        return AllowedUrl(parsed.copy_with(fragment=None), host, port)

    def allows(self, url: str) -> bool:
        """Whether a page with this URL might be read; of corpora and services, whose URLs may be anything."""
        try:
            self.target(url)
        except PageError:
            return False
        return True

    def check_addresses(self, host: str, port: int, found: Iterable[str]) -> list[str]:
        """``found``, if all may be connected to for this host. Raises :class:`PageError`."""
        checked = []
        for text in found:
            try:
                address = ipaddress.ip_address(text)
            except ValueError:
                raise PageError(f"refused: {host} is at no address that is known") from None
            open_here = (host, port) in self._private and not never_read(address)
            if not (open_here or is_public(address)):
                raise PageError(f"refused: {host} is not on the public internet")
            checked.append(text)
        return checked

    def _check_name(self, host: str, port: int) -> None:
        literal = _literal(host)
        if literal is None and not _NAME.fullmatch(host):
            raise PageError("refused: the url names no host")
        if literal is None and _NUMERIC.fullmatch(host.rpartition(".")[2]):
            raise PageError("refused: the host is a number that is no ordinary address")
        named = [(host, port)] if literal is None else [(str(literal), port), (host, port)]
        if any(_covers(entry, one) for entry in self._block for one in named):
            raise PageError(f"refused: {printable(host, 100)} is blocked")
        listed = any(_covers(entry, one) for entry in self._allow for one in named)
        private = any(one in self._private for one in named)
        if self._allow and not (listed or private):
            raise PageError(f"refused: {printable(host, 100)} is not among the hosts that may be read")
        opened = private or any(entry[1] == port and _covers(entry, one) for entry in self._allow for one in named)
        if port < 1024 and port not in _PORTS.values() and not opened:
            raise PageError(f"refused: port {port} is none of web pages")
        if literal is not None:
            self.check_addresses(host, port, [str(literal)])


def _literal(host: str) -> IPv4Address | IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _covers(entry: tuple[str, int | None], asked: tuple[str, int]) -> bool:
    host, port = entry
    name = asked[0]
    below = name.endswith(f".{host}") and _literal(name) is None
    return (name == host or below) and port in (None, asked[1])
