"""Which of all engines a server runs itself: vLLM's flags for load balancers outside of it.

Engines of data parallelism need nothing of each other, so a server of a few of them is the same as a server of them all.
"""

from typing import NamedTuple


class LocalEngines(NamedTuple):
    """
    Attributes:
        size: how many it has.
        start_rank: the rank of the first of them; the ranks of the others follow.
        size_local: how many of them, the first ones, are on its machine.
    """

    size: int
    start_rank: int
    size_local: int


def local_engines(
    size: int, rank: int | None, size_local: int | None, start_rank: int | None, hybrid_lb: bool, external_lb: bool
) -> LocalEngines:
    """From the arguments of the same names, which begin with `data_parallel_`.

    - internal (neither): the server shares out the requests among all engines. The first `size_local` are here, the others on
      machines that join it.
    - external (`rank`): one engine is here; who calls the servers shares out the requests among them.
    - hybrid (`hybrid_lb` or `start_rank`): `size_local` engines are here, and this server shares out what it gets among them.

    Raises:
        ValueError: naming the argument and its value.
    """
    if external_lb and rank is None:
        raise ValueError("data_parallel_external_lb needs data_parallel_rank")
    if rank is not None:
        if not 0 <= rank < size:
            raise ValueError(f"data_parallel_rank must be in [0, {size - 1}], got {rank}: data_parallel_size is {size}")
        if hybrid_lb or start_rank is not None:
            raise ValueError("data_parallel_rank is for one engine a server; it excludes data_parallel_hybrid_lb and start_rank")
        if size_local not in (None, 1):
            raise ValueError(f"data_parallel_size_local must be 1 with data_parallel_rank, got {size_local}")
        return LocalEngines(1, rank, 1)
    if hybrid_lb or start_rank is not None:
        start = start_rank or 0
        if size_local is None:
            raise ValueError("data_parallel_hybrid_lb and data_parallel_start_rank need data_parallel_size_local")
        if size_local < 1 or start < 0 or start + size_local > size:
            raise ValueError(
                f"data_parallel_start_rank {start} and data_parallel_size_local {size_local} must lie in "
                f"data_parallel_size {size}"
            )
        return LocalEngines(size_local, start, size_local)
    if size_local is None:
        size_local = size
    if not 0 <= size_local <= size:
        raise ValueError(f"data_parallel_size_local must be in [0, data_parallel_size {size}], got {size_local}")
    return LocalEngines(size, 0, size_local)
