"""Compiling on machines that share a folder: what ``--cluster`` names.

    graphopt optimize MODEL -o OUT --cluster dask://             workers on this machine
    graphopt optimize MODEL -o OUT --cluster dask://HOST:8786    those of a scheduler that runs already
    graphopt optimize MODEL -o OUT --cluster slurm -j 16         16 jobs, which end with the command

    this process ----small messages----> scheduler of dask ----> workers
         |                                                          |
         +----------------- shared folder: data --------------------+

A task is an expression, or a few, and says where its data lies: weights in the work folder under the digest of what
they are, arrays under the digest of their bytes. No data goes through the scheduler, so it needs little memory and
may be restarted: what was evaluated lies in the folder, and what was not is asked for again.

kinds/            one file, one kind of cluster
executor.py       an executor of ``concurrent.futures`` that lasts longer than its workers, and than its scheduler
parcels.py        messages of bounded size; what is larger lies in the shared folder
conditions.py     what must hold on a worker: versions, instructions, folders
"""

from graphopt.compile.clusters.executor import ClusterExecutor as ClusterExecutor
from graphopt.compile.clusters.kind import ClusterKind as ClusterKind
from graphopt.compile.clusters.kind import open_cluster as open_cluster
