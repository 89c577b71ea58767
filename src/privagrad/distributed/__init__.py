"""Rows on a Dask cluster: they stay on its workers, which bound and add up what a step needs.

Needs ``pip install 'privagrad[dask]'``, here and on every worker.
"""

from privagrad.distributed.collections import from_dask
from privagrad.distributed.partitions import ClusterPartitions

__all__ = ["ClusterPartitions", "from_dask"]
