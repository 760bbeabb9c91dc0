"""`python -m dmljax` is the command `dmljax`."""

from dmljax.main import console

if __name__ == "__main__":
    raise SystemExit(console())
