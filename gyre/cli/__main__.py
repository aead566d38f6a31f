"""Shell. `python -m gyre.cli`."""

from gyre.cli import main

if __name__ == "__main__":
    main()
