"""`python -m gradsync_fx`: the command line."""

from gradsync_fx.cli.main import main


if __name__ == "__main__":
    main()
