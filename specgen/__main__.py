"""``python -m specgen`` is the ``specgen`` command."""

from specgen.cli import main

if __name__ == "__main__":
    main()
