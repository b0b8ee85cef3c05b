"""`python -m fedgg` is the command `fedgg`."""

from fedgg.cli import main

if __name__ == "__main__":
    main()
