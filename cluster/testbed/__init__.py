"""Several hosts on one machine: network namespaces, rate-limited cables, a Ray node on each.

It also runs an S3 server. Needs root.

with TestBed.up("mine", hosts=2, rate="1gbit") as bed:
    bed.run(0, ["python", "-c", "print('hello')"])
    bed.cut(1)
"""

from cluster.testbed.bed import HEALTH_CHECK, BedError, TestBed
from cluster.testbed.network import Cut, Network, NetworkError, why_not

__all__ = ["HEALTH_CHECK", "BedError", "Cut", "Network", "NetworkError", "TestBed", "why_not"]
