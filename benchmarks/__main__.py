"""`python -m benchmarks`: gossamer beside its peers, in a checkout of the repository."""

from benchmarks.engine.command import bench
from gossamer.cli.application import application

main = application(bench, "benchmarks")

if __name__ == "__main__":
    main()
