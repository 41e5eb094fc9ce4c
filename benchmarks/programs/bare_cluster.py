"""The bare local cluster that daskserve starts if there is none, without daskserve."""

import sys

from daskserve.cluster.dask.launch import start_local_cluster
from daskserve.common import settings

cluster, client = start_local_cluster(settings.local_cluster_size(), has_dashboard=True)
print("ready", flush=True)
sys.stdin.readline()
client.close()
cluster.close()
