"""`penstock`, but an engine that is away is given up after a second instead of half a minute."""

from penstock.cli import main
from penstock.workloads.container import monitor

if __name__ == "__main__":
    monitor.ENGINE_PATIENCE = 1.0
    main()
