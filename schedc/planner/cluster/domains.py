"""Says how the devices of a plan lie in the domains of a network, and how many members of a group share a domain.

Ranks follow each other. They fill every domain of the innermost level, or leave as many devices of each domain spare:

    packed  | 0 1 2 3 4 5 6 7 8 | 9 10 11 ...      groups of 4 straddle domains of 9 devices
    spare 1 | 0 1 2 3 4 5 6 7 . | 8  9 10 ...      groups of 4 lie in one domain
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import gcd

import numpy as np

from schedc.ir.arrays import Floats
from schedc.planner.cluster.values import Cluster

_LEAST_USED = 0.5
"""Share of a domain that plans with spare devices use at least."""


@lru_cache(maxsize=4096)
def spare_devices(cluster: Cluster, group: int) -> int:
    """Devices of each domain that stay spare, so that groups of so many neighbours do not straddle domains.

    0 where none have to, or where no number of whole nodes helps. Devices that fill no whole domains take as many of
    them as they need, each with equally many ranks.
    """
    domain, node = cluster.levels[0].size, cluster.per_node
    whole = cluster.devices % domain == 0
    if cluster.devices < domain or (whole and tiles(group, domain)):
        return 0
    for used in range((domain - 1) // node * node, 0, -node):
        if used < _LEAST_USED * domain:
            break
        if tiles(group, used) and (whole or cluster.devices % used == 0):
            return domain - used
    return 0


def tiles(group: int, domain: int) -> bool:
    """Whether groups of so many neighbours fill whole domains, or a domain holds whole groups."""
    return domain % group == 0 or group % domain == 0


def occupied_devices(cluster: Cluster, spare: int) -> int:
    """Devices of a plan, with the spare devices of its domains."""
    if not spare:
        return cluster.devices
    domain = cluster.levels[0].size
    return -(-placed(cluster, spare).devices // (domain - spare)) * domain


def placed(cluster: Cluster, spare: int) -> Cluster:
    """The cluster without the spare devices: smaller domains on every level, and the devices that a plan uses."""
    return _without(cluster, spare) if spare else cluster


@lru_cache(maxsize=4096)
def _without(cluster: Cluster, spare: int) -> Cluster:
    domain = cluster.levels[0].size
    used = domain - spare
    devices = cluster.devices // domain * used if cluster.devices % domain == 0 else cluster.devices
    levels = tuple(replace(level, size=-(-level.size // domain) * used) for level in cluster.levels)
    return replace(cluster, devices=devices, levels=levels, source=None)


def equal_nodes(group: int, cluster: Cluster) -> int:
    """Members of an expert group that share a domain in every such group, whatever member is asked.

    Where groups straddle domains, the ends of domains cut them at multiples of the common divisor of both.
    """
    domain = cluster.levels[0].size
    if tiles(group, domain) or cluster.devices <= domain:
        return min(group, domain)
    return gcd(group, domain)


@lru_cache(maxsize=4096)
def spanned_domains(group: int, domain: int, devices: int) -> int:
    """The most domains of the innermost level that a group of so many neighbours lies in."""
    starts = np.arange(max(1, min(devices // group, domain // gcd(group, domain)))) * group
    return int(((starts + group - 1) // domain - starts // domain).max()) + 1


def members(ranks: Floats, stride: Floats | float, domain: Floats | float, devices: Floats | float) -> Floats:
    """[...] members of a group in the domain of its worst member, itself included: the census of groups.

    ranks: [...] members, ``stride`` devices apart. Groups start at multiples of ``ranks * stride``, and at the devices
    between two members. domain: devices of a domain; 0 where one has all. devices: of the plan. The member with the
    fewest neighbours is that of the shortest piece between the ends of a group and those of domains.
    """
    extent, size, whole = np.broadcast_arrays(np.asarray(ranks * stride, np.int64), np.int64(domain), devices)
    shortest = np.where(whole <= size, extent, np.gcd(extent, size))
    odd = (shortest != extent) & (shortest != size)
    if odd.any():
        shortest[odd] = _PIECES(extent[odd], size[odd], whole[odd])
    return np.asarray(np.maximum(1.0, shortest // stride))


@lru_cache(maxsize=65_536)
def _shortest_piece(extent: int, domain: int, devices: float) -> int:
    """Devices of the shortest piece into which the ends of domains cut groups of ``extent`` neighbours."""
    common = gcd(extent, domain)
    cuts = min(-(-devices // domain), extent // common) - 1
    if cuts == extent // common - 1:
        return common
    offsets = np.arange(1, int(cuts) + 1, dtype=np.int64) * domain % extent
    return int(min(extent, domain, offsets.min(), (extent - offsets).min()))


_PIECES = np.frompyfunc(_shortest_piece, 3, 1)
