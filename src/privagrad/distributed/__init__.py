"""Rows on a Dask cluster: they stay on its workers, which bound and add up what a step needs.

Needs ``pip install 'privagrad[dask]'``, here and on every worker.
"""

try:
    import dask  # noqa: F401
    import distributed  # noqa: F401
except ImportError as error:
    raise ImportError(
        "Clusters need dask and distributed, here and on every worker: pip install "
        "'privagrad[dask]'."
    ) from error

from privagrad.distributed.clients import asked_of_a_worker, cluster_at, gathered
from privagrad.distributed.collections import from_dask
from privagrad.distributed.partitions import ClusterPartitions

__all__ = ["ClusterPartitions", "asked_of_a_worker", "cluster_at", "from_dask", "gathered"]
