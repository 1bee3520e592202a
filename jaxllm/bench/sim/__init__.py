"""The simulator: the real scheduler, block manager and load balancer on a virtual clock."""
