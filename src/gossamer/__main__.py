"""`python -m gossamer`: the command line, as the command `gossamer`."""

from gossamer.cli import main

if __name__ == "__main__":
    main()
