"""``python -m rewire``: the command line."""

from rewire.cli import main

if __name__ == "__main__":
    main()
