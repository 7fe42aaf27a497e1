"""What a Spark master or a host's name says of where things run. Pure."""

from __future__ import annotations

import ipaddress
import re

_MASTER = re.compile(
    r"local(\[(\*|\d+)(, *\d+)?\])?|local-cluster\[\d+, *\d+, *\d+\]"
    r"|spark://[^\s,:/]+:\d+(,[^\s,:/]+:\d+)*|yarn|k8s://\S+"
)


def is_master(text: str) -> bool:
    """Whether this is written as Spark writes a master."""
    return _MASTER.fullmatch(text) is not None


def is_cluster(master: str) -> bool:
    """Whether a master runs executors apart from the driver, most often on other machines."""
    return not master.startswith("local") or master.startswith("local-cluster")


def is_on_this_host(master: str) -> bool:
    """Whether all executors of a master run on this machine, as far as its address says."""
    if master.startswith("local"):
        return True
    places = master.removeprefix("spark://").split(",")
    return all(is_loopback(place.rpartition(":")[0]) for place in places)


def is_loopback(host: str) -> bool:
    """Whether a name or address is one of a machine's for itself."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
